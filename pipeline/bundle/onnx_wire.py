"""ONNX files at the level of protobuf's wire format, so that a model is read without its weights.

An inline model is mostly weights. Parsing one with `onnx.load` holds it twice (file and message); here only
the graph is read, and values of large tensors are stepped over. The field numbers are those of `onnx.proto3`;
the encoding is https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SMALL_BYTES = 16 * 1024
"""Messages up to this size are kept as they are; tensor values above it are left out of a skeleton."""

_MAX_DEPTH = 100
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

# Submessages that may hold tensors: message → field number → message.
_NESTED = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {},
}
_TENSOR_VALUES = frozenset({4, 5, 6, 7, 9, 10, 11})
_RAW_DATA = 9

ELEMENT_TYPE_NAMES: Mapping[int, str] = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128",
    16: "bfloat16", 17: "float8e4m3fn", 18: "float8e4m3fnuz", 19: "float8e5m2", 20: "float8e5m2fnuz",
    21: "uint4", 22: "int4", 23: "float4e2m1", 25: "uint2", 26: "int2",
}  # fmt: skip
"""`onnx.TensorProto.DataType`, as records spell it."""

Reader = Callable[[int, int], bytes]
"""Returns the bytes from an offset (inclusive) to another (exclusive)."""


Substitute = Callable[[int, int, int], bytes | None]
"""Says what stands for a large tensor's values: takes the number of their field, their offset in the file and
their length; returns fields of the tensor instead, or None to leave the values in."""


class WireError(ValueError):
    """Bytes that are not a protobuf message, or the beginning of one only."""


@dataclass(frozen=True)
class _Field:
    """One field: where it starts, where its payload starts, where it ends; offsets into what is read."""

    number: int
    wire_type: int
    start: int
    payload: int
    end: int


def _carry_on() -> None:
    pass


def read_skeleton(
    path: Path, substitute: Substitute | None = None, *, between_reads: Callable[[], object] = _carry_on
) -> bytes:
    """Reads an ONNX model without the values of its large tensors.

    Args:
        path: The model file, of any size.
        substitute: What tensors have in place of values above `SMALL_BYTES`; nothing if it is not given.
        between_reads: Called before every read; what it raises ends the reading.

    Returns:
        A serialised `ModelProto` in which tensors above `SMALL_BYTES` have name, type, dims and external
        location, but no values.

    Raises:
        WireError: The file is truncated or not a protobuf message.
        OSError: The file cannot be read.
    """
    handle = os.open(path, os.O_RDONLY)
    try:

        def read(start: int, end: int) -> bytes:
            between_reads()
            return os.pread(handle, end - start, start)

        return _strip(read, 0, os.fstat(handle).st_size, "model", substitute)
    finally:
        os.close(handle)


def external_locations(skeleton: bytes) -> tuple[str, ...]:
    """Returns the external data files a skeleton refers to, at any depth, each once, in order."""
    # Most models have none, and searching for the key that every reference carries is far quicker.
    if b"location" not in skeleton:
        return ()
    return tuple(dict.fromkeys(location for location, _ in _locations(skeleton, 0, len(skeleton), "model")))


def subgraph_locations(skeleton: bytes) -> tuple[str, ...]:
    """Returns the external data files that tensors of subgraphs are in, each once, in order."""
    if b"location" not in skeleton:
        return ()
    locations = _locations(skeleton, 0, len(skeleton), "model")
    return tuple(dict.fromkeys(location for location, in_subgraph in locations if in_subgraph))


def walk_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a message: their numbers, and numbers as such, everything else as bytes.

    Raises:
        WireError: The bytes are not a protobuf message.
    """
    for field in _fields(lambda start, end: message[start:end], 0, len(message)):
        payload = message[field.payload : field.end]
        yield field.number, _decode_varint(payload, 0)[0] if field.wire_type == _VARINT else payload


def write_tensor_field(*, header: bytes, values_bytes: int) -> bytes:
    """Returns what precedes a tensor's raw values in a serialised graph."""
    values_head = encode_varint(_RAW_DATA << 3 | _LENGTH) + encode_varint(values_bytes)
    body_bytes = len(header) + len(values_head) + values_bytes
    return encode_varint(5 << 3 | _LENGTH) + encode_varint(body_bytes) + header + values_head


def write_graph_field(graph_bytes: int) -> bytes:
    """Returns what precedes a graph of that length in a serialised model."""
    return encode_varint(7 << 3 | _LENGTH) + encode_varint(graph_bytes)


def encode_varint(value: int) -> bytes:
    """Encodes a number of zero or more in protobuf's variable length."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _strip(
    read: Reader, start: int, end: int, kind: str, substitute: Substitute | None, depth: int = 0
) -> bytes:
    if depth > _MAX_DEPTH:
        raise WireError(f"messages nested deeper than {_MAX_DEPTH}")
    nested = _NESTED[kind]
    skeleton = bytearray()
    for field in _fields(read, start, end):
        large = field.wire_type == _LENGTH and field.end - field.payload > SMALL_BYTES
        if large and kind == "tensor" and field.number in _TENSOR_VALUES:
            values = field.number, field.payload, field.end - field.payload
            other = b"" if substitute is None else substitute(*values)
            skeleton += read(field.start, field.end) if other is None else other
            continue
        if large and field.number in nested:
            inner = _strip(read, field.payload, field.end, nested[field.number], substitute, depth + 1)
            skeleton += encode_varint(field.number << 3 | _LENGTH) + encode_varint(len(inner)) + inner
        else:
            skeleton += read(field.start, field.end)
    return bytes(skeleton)


def _locations(
    data: bytes, start: int, end: int, kind: str, depth: int = 0, *, in_subgraph: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yields the location of every external tensor, and whether it is in a graph that a node holds."""
    if depth > _MAX_DEPTH:
        raise WireError(f"messages nested deeper than {_MAX_DEPTH}")
    entry: dict[int, str] = {}
    for field in _fields(lambda a, b: data[a:b], start, end):
        if field.wire_type != _LENGTH:
            continue
        if kind == "entry":
            entry[field.number] = data[field.payload : field.end].decode("utf-8", "surrogateescape")
        elif field.number in _NESTED[kind]:
            inner = _NESTED[kind][field.number]
            below = in_subgraph or (kind, inner) == ("attribute", "graph")
            yield from _locations(data, field.payload, field.end, inner, depth + 1, in_subgraph=below)
    if entry.get(1) == "location":
        yield entry.get(2, ""), in_subgraph


def _fields(read: Reader, start: int, end: int) -> Iterator[_Field]:
    position = start
    while position < end:
        head = read(position, min(position + 20, end))
        tag, used = _decode_varint(head, 0)
        if tag >= 2**32 or used > 5:  # protobuf takes the lower 32 bits: another field
            raise WireError(f"no tag of a protobuf field at byte {position}")
        wire_type = tag & 7
        if wire_type == _LENGTH:
            length, used = _decode_varint(head, used)
        elif wire_type == _VARINT:
            length = _decode_varint(head, used)[1] - used
        elif wire_type in (_FIXED32, _FIXED64):
            length = 4 if wire_type == _FIXED32 else 8
        else:
            raise WireError(f"no protobuf field at byte {position}")
        payload = position + used
        if payload + length > end or tag >> 3 == 0:
            raise WireError(f"field at byte {position} needs {length} bytes, {end - payload} are left")
        yield _Field(tag >> 3, wire_type, position, payload, payload + length)
        position = payload + length


def _decode_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise WireError("the last field is cut off")
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
    raise WireError("a number of more than ten bytes")
