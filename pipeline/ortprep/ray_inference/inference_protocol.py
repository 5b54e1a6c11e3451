"""The Open Inference Protocol (KServe v2) as functions of values: requests to arrays, arrays to responses.

https://github.com/kserve/open-inference-protocol, with the binary tensor extension
(https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md). What a
client sends is checked before anything is allocated for it. Nothing here knows HTTP or Ray.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortprep.bundle.loader_config import MAX_RANK, LoaderConfig, TensorSpec
from ortprep.errors import InvalidRequestError
from ortprep.runtime.tensors.element_types import (
    BFLOAT16,
    MAX_EMPTY_ELEMENTS,
    Array,
    is_bounded_shape,
    is_valid_bool,
    numpy_dtype,
    widen,
)

HEADER_LENGTH = "inference-header-content-length"
MAX_HEADER_BYTES = 1024 * 1024
"""Largest JSON header in front of binary tensors."""

MAX_BRACKETS = 64 * 1024
"""Most lists and objects in a request's JSON: to make arrays of them takes far longer than of numbers."""

EXTENSIONS = ("binary_tensor_data",)

_DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64",
    "float16": "FP16", "float32": "FP32", "float64": "FP64", "bfloat16": "BF16",
}  # fmt: skip
_CHUNK_VALUES = 16_384
"""Values that are written as JSON at a time: Python's encoder lets no other thread run meanwhile."""

_JSON_TYPES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}


class ProtocolError(InvalidRequestError):
    """A client's request cannot be answered as it is.

    Attributes:
        status: The HTTP status that says so.
    """

    details = ("status",)
    status: int = 400

    @classmethod
    def of(cls, status: int, message: str) -> ProtocolError:
        """Returns an error of another status than 400."""
        error = cls(message)
        error.status = status
        return error


@dataclass(frozen=True)
class OutputRequest:
    """An output that a client requests.

    Attributes:
        index: Its position among the model's.
        binary: Whether it goes behind the response's JSON, as bytes.
    """

    index: int
    binary: bool


@dataclass(frozen=True)
class InferRequest:
    """A request that the model takes.

    Attributes:
        arrays: Inputs by name, in the model's order.
        outputs: In the order they were asked for.
        id: The client's name of the request; "" for none.
    """

    arrays: Mapping[str, Array]
    outputs: tuple[OutputRequest, ...]
    id: str = ""


def datatype_of(tensor: TensorSpec) -> str:
    """Returns the protocol's name of a tensor's element type."""
    return _DATATYPES.get(tensor.dtype, tensor.dtype.upper())


def describe_model(name: str, version: str, config: LoaderConfig) -> dict[str, Any]:
    """Returns a model's metadata, as the protocol has it."""
    return {
        "name": name,
        "versions": [version],
        "platform": "onnxruntime_onnx",
        "inputs": [_describe_tensor(tensor) for tensor in config.inputs],
        "outputs": [_describe_tensor(tensor) for tensor in config.outputs],
    }


def shape_of(tensor: TensorSpec) -> list[int]:
    """Returns a tensor's shape with -1 for sizes that are not fixed; of an unknown rank, only that."""
    if tensor.shape is None:
        return [-1]
    return [size if isinstance(size, int) else -1 for size in tensor.shape]


def _describe_tensor(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": datatype_of(tensor), "shape": shape_of(tensor)}


def describe_inputs(config: LoaderConfig) -> str:
    """Returns what a model takes, for errors: `x FP32 [-1, 4], …`."""
    return (
        ", ".join(f"{tensor.name} {datatype_of(tensor)} {shape_of(tensor)}" for tensor in config.inputs)
        or "none"
    )


def parse_request(body: bytes, header_length: int | None, config: LoaderConfig) -> InferRequest:
    """Returns what an inference request over HTTP asks for.

    Args:
        body: JSON, with binary tensors behind it.
        header_length: Bytes of the JSON; None for all of them.
        config: The bundle's loader config.

    Raises:
        ProtocolError: It is not a request, or not one for this model.
    """
    if header_length is not None and not 0 < header_length <= min(len(body), MAX_HEADER_BYTES):
        raise ProtocolError(
            f"bad Inference-Header-Content-Length: {header_length}\n"
            f"  expected 1 to {min(len(body), MAX_HEADER_BYTES)} bytes of JSON"
        )
    header = _parse_json(body if header_length is None else body[:header_length])
    binary = memoryview(body)[len(body) if header_length is None else header_length :]
    request_id = header.get("id", "")
    if not isinstance(request_id, str):
        raise ProtocolError("bad id\n  expected a string")
    arrays = _read_inputs(config, _objects(header, "inputs"), binary)
    return InferRequest(arrays, _read_outputs(config, header), request_id)


def _parse_json(text: bytes) -> Mapping[str, Any]:
    """Returns a JSON object, after its lists and objects were counted."""
    if text.count(b"[") + text.count(b"{") > MAX_BRACKETS:
        raise ProtocolError.of(
            413,
            f"request has too many lists and objects\n  expected at most {MAX_BRACKETS}; "
            "data may be one flat list, or binary tensors",
        )
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError("request is not JSON\n  expected an object with inputs") from None
    if not isinstance(header, dict):
        raise ProtocolError("request is not a JSON object\n  expected an object with inputs")
    return header


def _objects(header: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    entries = header.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ProtocolError(f"bad {key}\n  expected a list of objects")
    return entries


def _parameters(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = entry.get("parameters", {})
    if not isinstance(parameters, dict):
        raise ProtocolError("bad parameters\n  expected an object")
    unsupported = [key for key in ("shared_memory_region", "classification") if key in parameters]
    if unsupported:
        raise ProtocolError(f"{unsupported[0]} is not supported\n  expected {', '.join(EXTENSIONS)}")
    return parameters


def _read_inputs(
    config: LoaderConfig, entries: Iterable[Mapping[str, Any]], binary: memoryview
) -> dict[str, Array]:
    """Returns the inputs by name, in the model's order; raises unless there is exactly one for each.

    Args:
        config: The bundle's loader config.
        entries: What the JSON says of each input.
        binary: What follows the JSON: the bytes of inputs with a `binary_data_size`, one after the other.
    """
    tensors = {tensor.name: tensor for tensor in config.inputs}
    arrays: dict[str, Array] = {}
    begin = 0
    for entry in entries:
        name, size = entry.get("name"), _parameters(entry).get("binary_data_size")
        if not isinstance(name, str) or name not in tensors or name in arrays:
            twice = " twice" if isinstance(name, str) and name in arrays else ""
            raise _wrong_inputs(config, f"got {_quote(name)}{twice}")
        shape = _read_shape(config, tensors[name], entry)
        if size is None:
            arrays[name] = _read_values(config, tensors[name], shape, entry.get("data"))
            continue
        if not _is_size(size) or "data" in entry:
            raise ProtocolError(f"input {name!r} needs either data or a binary_data_size of 0 or more")
        arrays[name] = _read_bytes(config, tensors[name], shape, binary[begin : begin + size])
        begin += size
    if begin != len(binary):
        raise ProtocolError(
            f"wrong amount of binary data\n  expected {begin} bytes, got {len(binary)} after the JSON header"
        )
    missing = [name for name in tensors if name not in arrays]
    if missing:
        raise _wrong_inputs(config, f"missing {', '.join(missing)}")
    return {name: arrays[name] for name in tensors}


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _read_outputs(config: LoaderConfig, header: Mapping[str, Any]) -> tuple[OutputRequest, ...]:
    """Returns the requested outputs, by default all; raises if one is unknown or there twice."""
    declared = [tensor.name for tensor in config.outputs]
    is_binary = _parameters(header).get("binary_data_output") is True
    if not header.get("outputs"):
        return tuple(OutputRequest(index, is_binary) for index in range(len(declared)))
    requests, remaining = [], list(declared)
    for entry in _objects(header, "outputs"):
        name = entry.get("name")
        if name not in remaining:
            expected = f"some of {', '.join(declared)}, each once"
            raise ProtocolError(f"wrong outputs for {config.name}\n  expected {expected}, got {_quote(name)}")
        remaining.remove(name)
        as_bytes = _parameters(entry).get("binary_data", is_binary) is True
        requests.append(OutputRequest(declared.index(name), as_bytes))
    return tuple(requests)


def _wrong_inputs(config: LoaderConfig, got: str) -> ProtocolError:
    return ProtocolError(f"wrong inputs for {config.name}\n  expected {describe_inputs(config)}, {got}")


def _read_shape(config: LoaderConfig, tensor: TensorSpec, entry: Mapping[str, Any]) -> list[int]:
    """Returns the shape of an input of the model's type, bounded where it is empty.

    Whether the model takes such a shape is left to ONNX Runtime.
    """
    shape, datatype = entry.get("shape"), entry.get("datatype")
    is_shape = isinstance(shape, list) and len(shape) <= MAX_RANK and all(map(_is_size, shape))
    if not isinstance(shape, list) or not is_shape or datatype != datatype_of(tensor):
        raise ProtocolError(
            f"input {tensor.name!r} of {config.name} does not fit\n  expected {datatype_of(tensor)} "
            f"{shape_of(tensor)}, got {_quote(datatype)} {_quote(shape)}"
        )
    if not is_bounded_shape(shape):
        raise ProtocolError(
            f"input {tensor.name!r} of {config.name} is empty and too large\n  expected sizes beside the 0 "
            f"of at most {MAX_EMPTY_ELEMENTS} together, got {_quote(shape)}"
        )
    return shape


def _read_bytes(config: LoaderConfig, tensor: TensorSpec, shape: Sequence[int], data: memoryview) -> Array:
    """Returns the array of an input that came as bytes, without copying them."""
    dtype = numpy_dtype(tensor.dtype)
    if not dtype.itemsize:  # texts have no size of their own
        return _read_values(config, tensor, shape, data)
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise ProtocolError(
            f"input {tensor.name!r} has the wrong size\n"
            f"  expected {expected} bytes for {shape}, got {len(data)}"
        )
    array = np.frombuffer(data, dtype).reshape(shape)
    if not is_valid_bool(array):
        raise ProtocolError(f"input {tensor.name!r} has wrong data\n  expected bytes of 0 and 1 for BOOL")
    return array


def _read_values(config: LoaderConfig, tensor: TensorSpec, shape: Sequence[int], data: object) -> Array:
    """Returns the array of values that came as numbers, in a flat list or in nested ones."""
    dtype = numpy_dtype(tensor.dtype)
    expected = f"{math.prod(shape)} values of {datatype_of(tensor)}, or bytes"
    wrong = ProtocolError(f"input {tensor.name!r} of {config.name} has wrong data\n  expected {expected}")
    types = _JSON_TYPES.get(dtype.kind)
    if not isinstance(data, list) or types is None:
        raise wrong
    try:
        # As objects: of texts, numpy gives every element the size of the longest.
        array = np.array(data, object).reshape(-1)
        if array.size != math.prod(shape) or not types.issuperset(map(type, array)):
            raise wrong
        with np.errstate(over="raise"):
            return array.astype(dtype).reshape(shape)
    except (ValueError, ArithmeticError):
        raise wrong from None


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def check_json_size(outputs: Sequence[OutputRequest], answers: Sequence[Array], max_bytes: int) -> None:
    """Checks the size of the arrays that are answered as JSON, which takes many times that.

    Raises:
        ProtocolError: They are too large together (status 413).
    """
    size_bytes = sum(answers[output.index].nbytes for output in outputs if not output.binary)
    if size_bytes > max_bytes:
        raise ProtocolError.of(
            413,
            f"answer is too large for JSON\n  expected at most {max_bytes} bytes, got {size_bytes}; "
            'ask for bytes with "parameters": {"binary_data_output": true}',
        )


def encode_response(
    request: InferRequest, model: str, version: str, config: LoaderConfig, answers: Sequence[Array]
) -> tuple[bytes, int | None]:
    """Returns the body of an inference response.

    Returns:
        The body, and how many bytes of it are JSON where binary tensors follow; else None.
    """
    entries: list[str] = []
    parts: list[bytes] = []
    for output in request.outputs:
        tensor, array = config.outputs[output.index], np.ascontiguousarray(answers[output.index])
        entry: dict[str, Any] = {"name": tensor.name, "datatype": datatype_of(tensor)}
        entry["shape"] = list(answers[output.index].shape)
        if output.binary:
            entry["parameters"] = {"binary_data_size": array.nbytes}
            parts.append(array.tobytes())
            entries.append(json.dumps(entry))
        else:
            plain = widen(array) if array.dtype == BFLOAT16 else array
            if plain.dtype.kind not in _JSON_TYPES:
                raise ProtocolError(f"output {tensor.name!r} has no JSON\n  ask for binary_data_output")
            entries.append(_add_to_object(entry, "data", _render_values(plain.reshape(-1))))
    header = {"model_name": model, "model_version": version, **({"id": request.id} if request.id else {})}
    text = _add_to_object(header, "outputs", ", ".join(entries)).encode()
    return b"".join([text, *parts]), len(text) if parts else None


def _render_values(values: Array) -> str:
    chunks = (values[begin : begin + _CHUNK_VALUES] for begin in range(0, len(values), _CHUNK_VALUES))
    return ", ".join(json.dumps(chunk.tolist())[1:-1] for chunk in chunks)


def _add_to_object(entry: Mapping[str, Any], key: str, items: str) -> str:
    """Returns an object as JSON, with a list more whose items are JSON already."""
    return f'{json.dumps(entry)[:-1]}, "{key}": [{items}]}}'
