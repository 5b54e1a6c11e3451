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
from ortprep.cluster.serving.admission import ReplicaApi
from ortprep.cluster.serving.inference_protocol import (
    EXTENSIONS,
    InferRequest,
    ProtocolError,
    SentTensor,
    build_request,
    datatype_of,
    describe_model,
)

if TYPE_CHECKING:
    from ortprep.bundle.loader_config import LoaderConfig
    from ortprep.cluster.serving.config import ServeConfig

SERVICER = "ortprep.cluster.serving.grpc_api.add_servicer"

MAX_FIELDS = 4096
"""Most fields of a message, without those within its inputs and outputs: each may take 50 times its bytes."""

MAX_QUERY_BYTES = 2**16
"""Size limit of a message without tensors: it is parsed on the event loop, beside the budget for bodies."""

_RAW_INPUT_CONTENTS = 7

_CONTENTS = {
    "BOOL": "bool", "INT8": "int", "INT16": "int", "INT32": "int", "INT64": "int64",
    "UINT8": "uint", "UINT16": "uint", "UINT32": "uint", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64",
}  # fmt: skip
"""First part of the name of a field with the numbers of an input, by datatype."""

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


def _answered(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a coroutine a method that takes the token and answers errors with a status and an empty message.

    Args:
        kind: Name of the message that is answered.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(self: GrpcMethods, data: bytes, grpc_context: Any) -> Any:
            try:
                if self.token is not None:
                    self.token.require(dict(grpc_context.invocation_metadata()).get("authorization"))
                return await method(self, data)
            except ProtocolError as error:
                grpc_context.set_code(_CODES.get(error.status, grpc.StatusCode.INVALID_ARGUMENT))
                grpc_context.set_details(error.message)
            except Exception:  # whatever it is, the log has it, and no text of the inside goes to a client
                log.exception("a request failed")
                grpc_context.set_code(grpc.StatusCode.INTERNAL)
                grpc_context.set_details("internal error; see the server's log")
            return getattr(_messages(), kind)()

        # Not `functools.wraps`: Serve gives the context to methods whose signature has one.
        call.__name__, call.__doc__ = method.__name__, method.__doc__
        return call

    return wrap


class GrpcMethods(ReplicaApi):
    """Methods named as the protocol's, of a request's bytes."""

    async def ServerLive(self, _: Any) -> Any:  # noqa: N802
        """Says that the server is there; needs no token."""
        return _messages().ServerLiveResponse(live=True)

    async def ServerReady(self, _: Any) -> Any:  # noqa: N802
        """Says that the server takes requests; needs no token."""
        return _messages().ServerReadyResponse(ready=True)

    @_answered("ServerMetadataResponse")
    async def ServerMetadata(self, _: bytes) -> Any:  # noqa: N802
        """Describes the server."""
        return _messages().ServerMetadataResponse(
            name="ortprep", version=ortprep.__version__, extensions=EXTENSIONS
        )

    @_answered("ModelReadyResponse")
    async def ModelReady(self, data: bytes) -> Any:  # noqa: N802
        """Says whether there is such a model, of such a version."""
        request, response = (
            parse_bytes("ModelReadyRequest", data, self.config),
            _messages().ModelReadyResponse(),
        )
        with contextlib.suppress(ProtocolError):
            self.find_model(request.name, request.version)
            response.ready = True
        return response

    @_answered("ModelMetadataResponse")
    async def ModelMetadata(self, data: bytes) -> Any:  # noqa: N802
        """Describes a model."""
        request = parse_bytes("ModelMetadataRequest", data, self.config)
        served = self.find_model(request.name, request.version)
        described = describe_model(served.name, served.version, served.opened.config)
        return _messages().ModelMetadataResponse(**described)

    @_answered("ModelInferResponse")
    async def ModelInfer(self, data: bytes) -> Any:  # noqa: N802
        """Runs a model."""
        with self.bodies.hold() as take:
            take(len(data))
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
    tensors = (
        SentTensor(entry.name, entry.datatype, list(entry.shape), raw[index] if raw else _values_of(entry))
        for index, entry in enumerate(request.inputs)
    )
    return build_request(config, tensors, [output.name for output in request.outputs], request.id)


def _values_of(entry: Any) -> list[Any] | None:
    """Returns the numbers of an input that has no raw bytes; None where its type only travels as bytes."""
    field = _CONTENTS.get(entry.datatype)
    return None if field is None else list(getattr(entry.contents, f"{field}_contents"))


def _messages() -> Any:
    from tritonclient.grpc import service_pb2

    return service_pb2
