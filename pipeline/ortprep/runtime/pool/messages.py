"""What goes between a pool and a worker: packets of a sequenced-packet socket, each one message.

A packet has a head, then the shapes of its tensors, then the data of small tensors, or JSON where it is rare.
Data begins on multiples of 64 bytes, in C order and native endianness. Types and numbers of tensors are those
of the model, which both sides have. What a worker sends is checked as if a stranger had sent it: the model
that it runs may have overwritten it. This module needs no numpy, which a worker imports after ONNX Runtime.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ortprep.errors import PoolError
from ortprep.runtime.ipc import (
    INLINE_BYTES,
    MAX_PACKET_BYTES,
    Shape,
    align,
    decode_shape,
    encode_shape,
    place_arrays,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEAD = struct.Struct("<BxHIQQQQ")
_MAX_CACHED = 1024
_MAX_TEXT = 7_000
HEAD_BYTES = _HEAD.size


class MessageKind(enum.IntEnum):
    """What a message is about.

    To a template: `FORK` a worker, whose descriptors come with it, and `REAP` one that has ended; from it:
    `FORKED` with the worker's process or why not, and `REAPED` with how it ended.

    To a worker: `RUN` a request; `STOP`. From a worker: `DONE`, a request; and as JSON `READY`, `BROKEN`
    where it cannot start, and `FAILED`, a request.
    """

    RUN = 1
    STOP = 4
    FORK = 5
    REAP = 6
    DONE = 16
    READY = 19
    BROKEN = 20
    FAILED = 21
    FORKED = 23
    REAPED = 24


_KINDS = {int(kind): kind for kind in MessageKind}


@dataclass(frozen=True)
class ReadyReport:
    """Content of `READY`: what a worker serves, by model, and its anonymous memory.

    `unfit`: why a template cannot be forked; empty if it can be.
    """

    variants: Mapping[str, str]
    buckets: Mapping[str, tuple[str, ...]]
    private_bytes: int
    unfit: str = ""


class Head(NamedTuple):
    """What a packet begins with.

    Attributes:
        model: Number of the model in the pool, of `RUN`.
        text_bytes: Bytes of the shapes.
        number: The slot's number, which no other slot of the pool ever had; a process (`FORKED`, `REAP`).
        begin: Where the slot's region begins in the file, of `RUN`.
        size: Bytes of the region, of `RUN`.
        figure: Nanoseconds that the run took (`DONE`); an error's number (`FORKED`); the system's status of a
            process (`REAPED`).
    """

    kind: MessageKind
    model: int = 0
    text_bytes: int = 0
    number: int = 0
    begin: int = 0
    size: int = 0
    figure: int = 0


class Layout(NamedTuple):
    """Where the tensors of a message lie.

    Attributes:
        text: The shapes as bytes.
        shapes: Shape of each tensor.
        offsets: Offset of each, from the beginning of its packet, or of its part of the slot's region.
        end: Where the last one ends.
        slot_bytes: Bytes that they take in the slot's region; 0 if they travel in the packet.
    """

    text: bytes
    shapes: tuple[Shape, ...]
    offsets: tuple[int, ...]
    end: int
    slot_bytes: int


@functools.lru_cache(_MAX_CACHED)
def lay_out(shapes: tuple[Shape, ...], itemsizes: tuple[int, ...]) -> Layout:
    """Returns where tensors go: to the packet if they are small together, else to the slot's region.

    Raises:
        PoolError: There are too many for a message.
    """
    text = b"".join(map(encode_shape, shapes))
    first = align(HEAD_BYTES + len(text))
    if first + INLINE_BYTES > MAX_PACKET_BYTES:
        raise PoolError(f"too many tensors for a message\n  got {len(shapes)}")
    sizes = [math.prod(shape) * itemsize for shape, itemsize in zip(shapes, itemsizes, strict=True)]
    offsets, end = places = place_arrays(sizes)
    slot_bytes = end
    if places.is_inline:
        offsets, end, slot_bytes = tuple([first + offset for offset in offsets]), first + end, 0
    return Layout(text, shapes, offsets, end, slot_bytes)


def encode_answer(
    number: int, layout: Layout, arrays: Sequence[NDArray[Any]] = (), *, service_ns: int = 0
) -> bytes:
    """Returns `DONE` for a slot, with the data of the arrays if they travel in the packet."""
    head = encode_head(MessageKind.DONE, number, text_bytes=len(layout.text), figure=service_ns)
    return head + encode_body(layout, arrays)


def encode_body(layout: Layout, arrays: Sequence[NDArray[Any]]) -> bytes:
    """Returns what follows the head of a message with tensors."""
    if layout.slot_bytes:
        return layout.text
    parts, end = [layout.text], HEAD_BYTES + len(layout.text)
    for array, offset in zip(arrays, layout.offsets, strict=True):
        native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
        parts += (bytes(offset - end), native.tobytes())
        end = offset + array.nbytes
    parts.append(bytes(layout.end - end))
    return b"".join(parts)


def encode_head(kind: MessageKind, number: int = 0, **fields: int) -> bytes:
    """Returns the head of a message, with fields of `Head`; by itself a message without content."""
    return _HEAD.pack(*Head(kind, number=number, **fields))


def encode(kind: MessageKind, number: int, content: Mapping[str, Any]) -> bytes:
    """Returns a packet with JSON, its long texts cut."""
    text = json.dumps(content).encode()
    if HEAD_BYTES + len(text) > MAX_PACKET_BYTES:
        short = {key: value[:_MAX_TEXT] if isinstance(value, str) else None for key, value in content.items()}
        text = json.dumps(short).encode()
    return encode_head(kind, number) + text


def decode_head(packet: memoryview, sender: str) -> Head:
    """Returns the head of a packet; raises `PoolError` if it is no message."""
    try:
        kind, *fields = _HEAD.unpack_from(packet)
        return Head(_KINDS[kind], *fields)
    except (struct.error, KeyError) as error:
        begin = bytes(packet[:16]).hex(" ")
        raise PoolError(f"unreadable message from {sender}\n  expected a head, got {begin} …") from error


def decode_json(packet: memoryview, sender: str) -> dict[str, Any]:
    """Returns the JSON object of a packet; raises `PoolError` if it has none."""
    try:
        content = json.loads(bytes(packet[HEAD_BYTES:]))
    except (ValueError, RecursionError) as error:
        raise PoolError(f"unreadable message from {sender}\n  {error}") from error
    if not isinstance(content, Mapping):
        raise PoolError(f"unreadable message from {sender}\n  expected a JSON object")
    return dict(content)


class LayoutReader:
    """Reads where the tensors of a model's messages lie; batch after batch it is the same.

    Args:
        itemsizes: Item size of each tensor, in bytes.
        subject: What the messages are, for errors.
    """

    def __init__(self, itemsizes: Sequence[int], subject: str) -> None:
        self._subject = subject
        decode = functools.partial(_decode_layout, tuple(itemsizes), subject)
        self._decode = functools.lru_cache(_MAX_CACHED)(decode)

    def read(self, packet: memoryview, head: Head, slot_bytes: int) -> Layout:
        """Returns the layout of a message whose tensors have so many bytes in a slot's region.

        Raises:
            PoolError: It is cut short, impossible, or does not fit the packet or the region.
        """
        layout = self._decode(bytes(packet[HEAD_BYTES : HEAD_BYTES + head.text_bytes]))
        limit = slot_bytes if layout.slot_bytes else len(packet)
        if layout.end > limit:
            raise PoolError(
                f"{self._subject} lies outside of its memory\n"
                f"  expected at most {limit} bytes, got {layout.end}"
            )
        return layout


def _decode_layout(itemsizes: tuple[int, ...], subject: str, text: bytes) -> Layout:
    """Returns the layout of arrays from their shapes in a message, which is not trusted."""
    shapes, position = [], 0
    try:
        for itemsize in itemsizes:
            shape, position = decode_shape(text, position, itemsize)
            shapes.append(shape)
    except (struct.error, ValueError) as error:
        raise PoolError(f"{subject} is cut short or impossible\n  {error}") from error
    if position != len(text):
        raise PoolError(f"{subject} has {len(text) - position} bytes too many")
    return lay_out(tuple(shapes), itemsizes)
