"""The Open Inference Protocol over gRPC: the methods that Serve's gRPC proxy calls on a replica.

The messages are those of `tritonclient.grpc`. Serve's proxy is given the servicer by its name (`SERVICER`).
It passes requests on as the bytes that came: parsed, two bytes can take a hundred, so a replica parses a
request only after it has checked the token and the size, and counted the fields.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

import ortprep
from ortprep.bundle.onnx_wire import WireError, walk_sizes
from ortprep.cluster.serving.inference_protocol import (
    EXTENSIONS,
    InferRequest,
    ProtocolError,
    check_tensor,
    datatype_of,
    describe_model,
    find_input,
    find_outputs,
    order_inputs,
    read_binary,
)
from ortprep.runtime.tensors.element_types import Array, numpy_dtype

if TYPE_CHECKING:
    from ortprep.bundle.loader_config import LoaderConfig
    from ortprep.cluster.serving.admission import BearerToken, BodyBudget
    from ortprep.cluster.serving.config import ServeConfig

SERVICER = "ortprep.cluster.serving.grpc_api.add_servicer"

MAX_FIELDS = 4096
"""Most fields of a message, without those within its inputs and outputs: each may take 50 times its bytes."""

MAX_QUERY_BYTES = 2**16
"""Size limit of a message without tensors: it is parsed on the event loop, beside the budget for bodies."""

_RAW_INPUT_CONTENTS = 7

log = logging.getLogger(__name__)

_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def add_servicer(servicer: Any, server: Any) -> None:
    """Adds the protocol's methods to a gRPC server, with requests as bytes; Serve's proxies call it."""
    service = _messages().DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
    names = [name for name in vars(GrpcMethods) if name[0].isupper()]
    handlers = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name)) for name in names}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


class GrpcMethods:
    """Methods named as the protocol's, of a request's bytes; `BundleDeployment` has the models."""

    config: ServeConfig
    token: BearerToken | None
    bodies: BodyBudget
    find_model: Callable[..., Any]
    infer: Callable[..., Any]
    convert: Callable[..., Any]

    async def ServerLive(self, _: Any) -> Any:  # noqa: N802
        """Says that the server is there; needs no token."""
        return _messages().ServerLiveResponse(live=True)

    async def ServerReady(self, _: Any) -> Any:  # noqa: N802
        """Says that the server takes requests; needs no token."""
        return _messages().ServerReadyResponse(ready=True)

    async def ServerMetadata(self, _: Any, grpc_context: Any) -> Any:  # noqa: N802
        """Describes the server."""
        try:
            self._require_token(grpc_context)
        except ProtocolError as error:
            return _refuse(grpc_context, error, _messages().ServerMetadataResponse())
        return _messages().ServerMetadataResponse(
            name="ortprep", version=ortprep.__version__, extensions=EXTENSIONS
        )

    async def ModelReady(self, data: bytes, grpc_context: Any) -> Any:  # noqa: N802
        """Says whether there is such a model, of such a version."""
        response = _messages().ModelReadyResponse(ready=False)
        try:
            self._require_token(grpc_context)
            request = parse_bytes("ModelReadyRequest", data, self.config)
        except ProtocolError as error:
            return _refuse(grpc_context, error, response)
        with contextlib.suppress(ProtocolError):
            self.find_model(request.name, request.version)
            response.ready = True
        return response

    async def ModelMetadata(self, data: bytes, grpc_context: Any) -> Any:  # noqa: N802
        """Describes a model."""
        try:
            self._require_token(grpc_context)
            request = parse_bytes("ModelMetadataRequest", data, self.config)
            served = self.find_model(request.name, request.version)
        except ProtocolError as error:
            return _refuse(grpc_context, error, _messages().ModelMetadataResponse())
        return _messages().ModelMetadataResponse(
            **describe_model(served.name, served.version, served.opened.config)
        )

    async def ModelInfer(self, data: bytes, grpc_context: Any) -> Any:  # noqa: N802
        """Runs a model."""
        response = _messages().ModelInferResponse()
        try:
            self._require_token(grpc_context)
            with self.bodies.hold() as take:
                take(len(data))
                return await self._infer(data)
        except ProtocolError as error:
            return _refuse(grpc_context, error, response)
        except Exception:  # whatever it is, the log has it, and no text of the inside goes to a client
            log.exception("a request failed")
            grpc_context.set_code(grpc.StatusCode.INTERNAL)
            grpc_context.set_details("internal error; see the server's log")
        return response

    def _require_token(self, context: Any) -> None:
        if self.token is not None:
            self.token.require(dict(context.invocation_metadata()).get("authorization"))

    async def _infer(self, data: bytes) -> Any:
        request = await self.convert(len(data), parse_bytes, "ModelInferRequest", data, self.config)
        served = self.find_model(request.model_name, request.model_version)
        config = served.opened.config
        parsed = await self.convert(len(data), parse_message, request, config)
        answers = await self.infer(served, parsed.arrays)
        response = _messages().ModelInferResponse(
            model_name=served.name, model_version=served.version, id=parsed.id
        )
        for output in parsed.outputs:  # copies of memory alone, on the event loop whatever their size
            tensor, array = config.outputs[output.index], answers[output.index]
            response.outputs.add(name=tensor.name, datatype=datatype_of(tensor), shape=array.shape)
            response.raw_output_contents.append(np.ascontiguousarray(array).tobytes())
        return response


def parse_bytes(kind: str, data: bytes, config: ServeConfig) -> Any:
    """Returns a message of a kind, once its size, and of what is not raw bytes in it, is checked.

    Raises:
        ProtocolError: It is too large or has too many fields (status 413), or is no such message.
    """
    max_bytes = config.max_body_bytes if kind == "ModelInferRequest" else MAX_QUERY_BYTES
    too_large = ProtocolError.of(
        413,
        f"request is too large\n  expected at most {max_bytes} bytes, {config.max_json_bytes} of "
        f"them outside of raw_input_contents, in {MAX_FIELDS} fields",
    )
    if len(data) > max_bytes:
        raise too_large
    plain_bytes = len(data)
    try:
        for count, (number, size_bytes) in enumerate(walk_sizes(data), 1):
            if count > MAX_FIELDS:
                raise too_large
            plain_bytes -= size_bytes if number == _RAW_INPUT_CONTENTS else 0
        if plain_bytes > config.max_json_bytes:
            raise too_large
        return getattr(_messages(), kind).FromString(data)
    except (WireError, DecodeError):
        raise ProtocolError(f"request is no {kind}\n  expected a message of the protocol") from None


def parse_message(request: Any, config: LoaderConfig) -> InferRequest:
    """Returns what a `ModelInferRequest` asks for.

    Raises:
        ProtocolError: It is not a request for this model.
    """
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise ProtocolError(f"wrong raw_input_contents\n  expected {len(request.inputs)}, got {len(raw)}")
    entries: dict[str, Array] = {}
    for index, entry in enumerate(request.inputs):
        tensor = find_input(config, entry.name, entries)
        shape = check_tensor(config, tensor, entry.datatype, list(entry.shape))
        data = raw[index] if raw else _typed_bytes(entry, numpy_dtype(tensor.dtype))
        entries[tensor.name] = read_binary(tensor, shape, data, len(data))
    outputs = find_outputs(config, [output.name for output in request.outputs])
    return InferRequest(order_inputs(config, entries), outputs, request.id)


_FIELDS = {"b": "bool", "i": "int", "u": "uint", "f": "fp32"}


def _typed_bytes(entry: Any, dtype: np.dtype[Any]) -> bytes:
    """Returns an input that came as numbers as the bytes it would have come as."""
    field = _FIELDS.get(dtype.kind, "bytes")
    if dtype.itemsize == 8:
        field = {"int": "int64", "uint": "uint64", "fp32": "fp64"}.get(field, field)
    if field == "bytes" or dtype == np.float16:
        raise ProtocolError(f"input {entry.name!r} of {entry.datatype} needs raw_input_contents")
    try:
        return np.array(getattr(entry.contents, f"{field}_contents"), dtype).tobytes()
    except (OverflowError, ValueError):
        raise ProtocolError(f"input {entry.name!r} has values beyond {entry.datatype}") from None


def _refuse(context: Any, error: ProtocolError, empty: Any) -> Any:
    """Makes of an error the call's status; returns the empty response that goes with it."""
    context.set_code(_CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT))
    context.set_details(error.message)
    return empty


def _messages() -> Any:
    from tritonclient.grpc import service_pb2

    return service_pb2
