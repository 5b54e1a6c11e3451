"""ONNX files at the level of protobuf's wire format, so that a model is read without its weights.

An inline model is mostly weights. Parsing one with `onnx.load` holds it twice (file and message); here only
the graph is read, and values of large tensors are stepped over. The field numbers are those of `onnx.proto3`;
the encoding is https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ortprep.bundle.file_memory import StrPath

SMALL_BYTES = 16 * 1024
"""Messages up to this size are kept as they are; tensor values above it are left out of a skeleton."""

_MAX_DEPTH = 100
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_HEAD_BYTES = 20
"""Most bytes of a field's tag and of the length or number after it."""
_WINDOW_BYTES, _MAX_SKELETON_BYTES = 4096, 2**29
_LOCATION = b"location"
_LOCATION_BYTES = 10
"""Bytes of the field that makes an entry a location; no shorter message has one."""

NESTED = {
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
"""Fields that may hold tensors, or name their files: message → field number → message."""
_TENSOR_VALUES = frozenset({4, 5, 6, 7, 9, 10, 11})

_TAGS = {
    kind: rb"(?:[%b]|[%b][\1-\x7f])"
    % (
        re.escape(bytes(number << 3 | kind for number in range(1, 16))),
        re.escape(bytes(0x80 | number << 3 | kind for number in range(16))),
    )
    for kind in (0, 1, 2, 5)
}
_NUMBERS = re.compile(
    rb"(?:%b[\x80-\xff]{0,9}[\0-\x7f]|%b.{4}|%b.{8}|%b\0)*+"
    % (_TAGS[_VARINT], _TAGS[_FIXED32], _TAGS[_FIXED64], _TAGS[_LENGTH]),
    re.DOTALL,
)
"""Whole fields that are a number, or empty, with a tag of one or two bytes: trees have millions of them."""

Reader = Callable[[int, int], bytes]
"""Returns the bytes from an offset (inclusive) to another (exclusive)."""


Substitute = Callable[[int, int, int], bytes | None]
"""Says what stands for a large tensor's values: takes the number of their field, their offset in the file and
their length; returns fields of the tensor instead, or None to leave the values in."""


class WireError(ValueError):
    """Bytes that are not a protobuf message, or the beginning of one only."""


class _Field(NamedTuple):
    """A field with a length: where it starts, where its payload starts, where it ends."""

    number: int
    start: int
    payload: int
    end: int


def _carry_on() -> None:
    pass


def read_skeleton(
    path: StrPath, substitute: Substitute | None = None, *, between_reads: Callable[[], object] = _carry_on
) -> bytes:
    """Reads an ONNX model without the values of its large tensors.

    Args:
        path: The model file, of any size.
        substitute: Gives what tensors have in place of values above `SMALL_BYTES`; None for nothing.
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
            data = os.pread(handle, end - start, start)
            if len(data) != end - start:
                raise WireError(f"cannot read {end - start} bytes at byte {start}, the file became shorter")
            return data

        return _strip(read, 0, os.fstat(handle).st_size, "model", substitute)
    finally:
        os.close(handle)


def external_locations(
    skeleton: bytes, *, in_subgraphs_only: bool = False, between_reads: Callable[[], object] = _carry_on
) -> tuple[str, ...]:
    """Returns the external data files a skeleton refers to, at any depth, each once, in order.

    Args:
        skeleton: A serialised model, with or without its weights.
        in_subgraphs_only: Whether only tensors of graphs count that nodes hold.
        between_reads: As for `read_skeleton`.

    Raises:
        WireError: It is not a protobuf message.
    """

    def read(start: int, end: int) -> bytes:
        between_reads()
        return skeleton[start:end]

    found = _locations(skeleton, read, 0, len(skeleton), "model")
    return tuple(dict.fromkeys(name for name, in_subgraph in found if in_subgraph or not in_subgraphs_only))


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
    """Returns a message without the values of its large tensors, those of nested messages included."""
    if depth > _MAX_DEPTH:
        raise WireError(f"messages nested deeper than {_MAX_DEPTH}")
    nested = NESTED[kind]
    skeleton, kept = bytearray(), start
    for field in _fields(read, start, end, min_bytes=SMALL_BYTES + 1):
        if kind == "tensor" and field.number in _TENSOR_VALUES:
            values = field.number, field.payload, field.end - field.payload
            other = b"" if substitute is None else substitute(*values)
        elif field.number in nested:
            inner = _strip(read, field.payload, field.end, nested[field.number], substitute, depth + 1)
            other = encode_varint(field.number << 3 | _LENGTH) + encode_varint(len(inner)) + inner
        else:
            continue
        if other is not None:
            _keep(read, kept, field.start, skeleton)
            skeleton += other
            kept = field.end
    _keep(read, kept, end, skeleton)
    return bytes(skeleton)


def _keep(read: Reader, start: int, end: int, skeleton: bytearray) -> None:
    """Adds what lies between two places of a file to a skeleton, if that does not become too large."""
    if len(skeleton) + end - start > _MAX_SKELETON_BYTES:
        raise WireError(f"expected at most {_MAX_SKELETON_BYTES} bytes beside tensors, got more")
    skeleton += read(start, end)


def _locations(
    skeleton: bytes,
    read: Reader,
    start: int,
    end: int,
    kind: str,
    depth: int = 0,
    *,
    in_subgraph: bool = False,
) -> Iterator[tuple[str, bool]]:
    """Yields the location of every external tensor, and whether it is in a graph that a node holds."""
    if depth > _MAX_DEPTH:
        raise WireError(f"messages nested deeper than {_MAX_DEPTH}")
    entry: dict[int, bytes] = {}
    min_bytes = 0 if kind == "entry" else _LOCATION_BYTES
    for field in _fields(read, start, end, min_bytes=min_bytes):
        if kind == "entry":
            entry[field.number] = read(field.payload, field.end)
        elif (inner := NESTED[kind].get(field.number)) and (
            # Searching for the key that every reference carries is far quicker than parsing.
            skeleton.find(_LOCATION, field.payload, field.end) >= 0
        ):
            below = in_subgraph or (kind, inner) == ("attribute", "graph")
            place = field.payload, field.end, inner, depth + 1
            yield from _locations(skeleton, read, *place, in_subgraph=below)
    if entry.get(1) == _LOCATION:
        yield entry.get(2, b"").decode("utf-8", "surrogateescape"), in_subgraph


def _fields(read: Reader, start: int, end: int, *, min_bytes: int) -> Iterator[_Field]:
    """Checks the fields of a message, and yields those that have a length, of `min_bytes` and more.

    Millions of fields are normal, and cheap only if those that nobody wants are neither read one by one nor
    yielded; an empty one is wanted only where `min_bytes` is 0.
    """
    position = window_start = start
    window = b""
    while position < end:
        offset = position - window_start
        if offset + _HEAD_BYTES > len(window):
            window_start, offset = position, 0
            window = read(position, min(position + _WINDOW_BYTES, end))
        if min_bytes and (numbers := _NUMBERS.match(window, offset)) and numbers.end() > offset:
            position = window_start + numbers.end()
            continue
        tag, after_tag = _decode_varint(window, offset)
        wire_type = tag & 7
        if wire_type == _LENGTH:
            length, after = _decode_varint(window, after_tag)
        elif wire_type == _VARINT:
            after = after_tag
            length = _decode_varint(window, after)[1] - after
        else:
            after, length = after_tag, _FIXED_BYTES.get(wire_type, -1)
        if tag >= 2**32 or after_tag - offset > 5 or length < 0:  # protobuf takes the lower 32 bits of a tag
            raise WireError(f"no protobuf field at byte {position}")
        payload = window_start + after
        if payload + length > end or tag >> 3 == 0:
            raise WireError(f"field at byte {position} needs {length} bytes, {end - payload} are left")
        if wire_type == _LENGTH and length >= min_bytes:
            yield _Field(tag >> 3, position, payload, payload + length)
        position = payload + length


def _decode_varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns a number and the position after it."""
    try:
        value = data[position]
        if value < 0x80:
            return value, position + 1
        value &= 0x7F
        for shift in range(7, 70, 7):
            position += 1
            byte = data[position]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position + 1
    except IndexError:
        raise WireError("the last field is cut off") from None
    raise WireError("a number of more than ten bytes")
