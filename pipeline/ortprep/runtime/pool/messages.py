"""What goes between a pool and a worker: packets of a sequenced-packet socket, each one message.

A packet has a head, then where each tensor lies, then the data of small tensors, or JSON where it is rare.
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
from typing import Any, NamedTuple

from ortprep.bundle.loader_config import MAX_RANK
from ortprep.errors import PoolError

INLINE_BYTES = 16 * 1024
"""Most data of tensors that travels in a packet; more lies in shared memory."""

MAX_PACKET_BYTES = 96 * 1024
"""Largest packet, under half of what a socket of Linux holds by default (`net.core.wmem_default`)."""

IN_PACKET, IN_BLOCK, IN_FILE = 0, 1, 2
"""What a tensor's offset counts from: its packet, the block of its message, or the memory file."""

_HEAD = struct.Struct("<BxHHxxI4xQQQQQ")
_PLACE = struct.Struct("<IIQ")
_ALIGNMENT = 64
_MAX_CACHED = 1024
_MAX_TEXT = 7_000
HEAD_BYTES = _HEAD.size


class MessageKind(enum.IntEnum):
    """What a message is about.

    To a worker: `RUN` a request; `RELEASE` blocks of its answers; `TRIM`, give idle memory back; `CHECK` the
    golden samples; `STOP`. From a worker: `DONE`, a request, and as JSON `PHASE` of its start, `READY`,
    `BROKEN` where it cannot start, `FAILED`, a request, and `CHECKED`.
    """

    RUN = 1
    RELEASE = 2
    TRIM = 3
    CHECK = 4
    STOP = 5
    DONE = 16
    PHASE = 17
    READY = 18
    BROKEN = 19
    FAILED = 20
    CHECKED = 21


_KINDS = {int(kind): kind for kind in MessageKind}


@dataclass(frozen=True)
class StartPhase:
    """Content of `PHASE`: what a worker has just finished of its start, and how long that took."""

    phase: str
    seconds: float


@dataclass(frozen=True)
class ReadyReport:
    """Content of `READY`: what a worker serves, by model, and its anonymous memory."""

    variants: Mapping[str, str]
    buckets: Mapping[str, tuple[str, ...]]
    private_bytes: int


class Head(NamedTuple):
    """What a packet begins with.

    Attributes:
        model: Number of the model in the pool, of `RUN`.
        block: Where the message's block begins in the file.
        block_bytes: Size of the block, 0 without one.
        elapsed_ns: What the run took, of `DONE`.
        copied_bytes: How many bytes the worker copied, of `DONE`.
    """

    kind: MessageKind
    model: int = 0
    tensors: int = 0
    text_bytes: int = 0
    number: int = 0
    block: int = 0
    block_bytes: int = 0
    elapsed_ns: int = 0
    copied_bytes: int = 0


class Span(NamedTuple):
    """Bytes of the memory file: where they begin, and how many."""

    offset: int = 0
    size: int = 0


NOWHERE = Span()


class TensorPlace(NamedTuple):
    """Where a tensor lies: what its offset counts from, the offset, and its shape."""

    base: int
    offset: int
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """Where the tensors of a message go: `text` is the places as bytes.

    Attributes:
        copied: Positions of those that are copied into the packet or the block.
        block_bytes: Size of the block; 0 if none is needed.
    """

    text: bytes
    places: tuple[TensorPlace, ...]
    copied: tuple[int, ...]
    block_bytes: int


@functools.lru_cache(_MAX_CACHED)
def lay_out(
    shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    offsets: tuple[int | None, ...] | None = None,
) -> Layout:
    """Returns where the tensors of a message go: to the packet if they are small together, else to a block.

    Those that have an offset are in the file already, and are not copied.

    Raises:
        PoolError: There are too many for a message.
    """
    known_offsets = offsets or (None,) * len(shapes)
    copied = tuple(position for position, offset in enumerate(known_offsets) if offset is None)
    text_bytes = sum(_PLACE.size + 8 * len(shape) for shape in shapes)
    if _align(HEAD_BYTES + text_bytes) + INLINE_BYTES > MAX_PACKET_BYTES:
        raise PoolError(f"too many tensors for a message\n  got {len(shapes)}")
    is_inline = sum(_align(sizes[position]) for position in copied) <= INLINE_BYTES
    end, places = _align(HEAD_BYTES + text_bytes) if is_inline else 0, []
    for shape, size, offset in zip(shapes, sizes, known_offsets, strict=True):
        if offset is not None:
            places.append(TensorPlace(IN_FILE, offset, shape))
            continue
        places.append(TensorPlace(IN_PACKET if is_inline else IN_BLOCK, end, shape))
        end += _align(size)
    text = b"".join(
        _PLACE.pack(base, len(shape), offset) + struct.pack(f"<{len(shape)}Q", *shape)
        for base, offset, shape in places
    )
    return Layout(text, tuple(places), copied, 0 if is_inline else end)


def encode_tensors(
    kind: MessageKind, model: int, number: int, layout: Layout, block: Span, *figures: int
) -> bytes:
    """Returns head and places of a message with tensors; `figures` are `elapsed_ns` and `copied_bytes`."""
    elapsed_ns, copied_bytes = figures or (0, 0)
    sizes = (len(layout.places), len(layout.text))
    return _HEAD.pack(kind, model, *sizes, number, *block, elapsed_ns, copied_bytes) + layout.text


def encode(kind: MessageKind, number: int = 0, *, content: Any = None, offsets: Sequence[int] = ()) -> bytes:
    """Returns a packet without tensors: with JSON, its long texts cut, with offsets, or with nothing."""
    head = _HEAD.pack(*Head(kind, number=number))
    if content is None:
        return head + struct.pack(f"<{len(offsets)}Q", *offsets)
    text = json.dumps(content).encode()
    if HEAD_BYTES + len(text) > MAX_PACKET_BYTES:
        short = {key: value[:_MAX_TEXT] if isinstance(value, str) else None for key, value in content.items()}
        text = json.dumps(short).encode()
    return head + text


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


def decode_offsets(packet: memoryview) -> tuple[int, ...]:
    """Returns the offsets that follow a packet's head."""
    return struct.unpack(f"<{(len(packet) - HEAD_BYTES) // 8}Q", packet[HEAD_BYTES:])


class PlaceReader:
    """Reads where the tensors of a model's messages lie; batch after batch it is the same."""

    def __init__(self, itemsizes: Sequence[int], subject: str) -> None:
        self._itemsizes, self._subject = tuple(itemsizes), subject
        self._known: dict[bytes, tuple[tuple[TensorPlace, ...], tuple[int, ...]]] = {}

    def read(self, packet: memoryview, head: Head) -> tuple[TensorPlace, ...]:
        """Returns the places; those in the packet or in the block lie inside of it.

        Raises:
            PoolError: They are cut short, contradict themselves, or lie outside.
        """
        text = bytes(packet[HEAD_BYTES : HEAD_BYTES + head.text_bytes])
        decoded = self._known.get(text)
        if decoded is None:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            decoded = self._known[text] = self._decode(text, head.tensors)
        limits = (len(packet), head.block_bytes)
        for place, size in zip(*decoded, strict=True):
            if place.base <= IN_BLOCK and place.offset + size > limits[place.base]:
                raise PoolError(f"{self._subject} lies outside of its memory\n  got {size} bytes at {place}")
        return decoded[0]

    def _decode(self, text: bytes, count: int) -> tuple[tuple[TensorPlace, ...], tuple[int, ...]]:
        if count != len(self._itemsizes):
            expected = len(self._itemsizes)
            raise PoolError(
                f"{self._subject} has a different number of tensors than its model\n"
                f"  expected {expected}, got {count}"
            )
        places, sizes, position = [], [], 0
        try:
            for itemsize in self._itemsizes:
                base, rank, offset = _PLACE.unpack_from(text, position)
                position += _PLACE.size
                shape = struct.unpack_from(f"<{min(rank, MAX_RANK)}Q", text, position)
                position += 8 * rank
                places.append(TensorPlace(base, offset, shape))
                sizes.append(math.prod(shape) * itemsize)
                if rank > MAX_RANK or base > IN_FILE or max((sizes[-1], *shape)) >= 2**62:
                    raise PoolError(f"{self._subject} has an impossible tensor\n  got {places[-1]}")
        except struct.error as error:
            raise PoolError(f"{self._subject} is cut short\n  {error}") from error
        return tuple(places), tuple(sizes)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
