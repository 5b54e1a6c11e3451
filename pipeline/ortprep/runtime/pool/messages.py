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
"""Maximum data of tensors that travels in a packet; more lies in the slot's region of shared memory."""

MAX_PACKET_BYTES = 96 * 1024
"""Largest packet, under half of what a socket of Linux holds by default (`net.core.wmem_default`)."""

IN_PACKET, IN_SLOT, IN_FILE = 0, 1, 2
"""What a tensor's offset counts from: its packet, the region of its slot, or the memory file."""

_HEAD = struct.Struct("<BxHHxxI4xQQQQ")
_PLACE = struct.Struct("<IIQ")
_ALIGNMENT = 64
_MAX_CACHED = 1024
_MAX_TEXT = 7_000
HEAD_BYTES = _HEAD.size


class MessageKind(enum.IntEnum):
    """What a message is about.

    To a template: `FORK` a worker, whose descriptors come with it, and `REAP` one that has ended; from it:
    `FORKED` with the worker's process or why not, and `REAPED` with how it ended.

    To a worker: `RUN` a request; `GROW`, its slot has as much room as its answer needs, or never will have
    (size 0); `CHECK` the golden samples; `STOP`. From a worker: `DONE`, a request; `NEED`, its answer does
    not fit its slot; and as JSON `READY`, `BROKEN` where it cannot start, `FAILED`, a
    request, and `CHECKED`.
    """

    RUN = 1
    GROW = 2
    CHECK = 3
    STOP = 4
    FORK = 5
    REAP = 6
    DONE = 16
    NEED = 17
    READY = 19
    BROKEN = 20
    FAILED = 21
    CHECKED = 22
    FORKED = 23
    REAPED = 24


_KINDS = {int(kind): kind for kind in MessageKind}


@dataclass(frozen=True)
class ReadyReport:
    """Content of `READY`: what a worker serves, by model, how long that took, and its anonymous memory.

    `unfit`: why a template cannot be forked; empty if it can be.
    """

    variants: Mapping[str, str]
    buckets: Mapping[str, tuple[str, ...]]
    phases_s: Mapping[str, float]
    private_bytes: int
    unfit: str = ""


class Head(NamedTuple):
    """What a packet begins with.

    Attributes:
        model: Number of the model in the pool, of `RUN`.
        number: The slot's number, which no other slot of the pool ever had; a process (`FORKED`, `REAP`).
        begin: Where the slot's region begins in the file, to a worker.
        size: Bytes of the region, to a worker; 0 without one.
        figure: Bytes of the region that inputs take (`RUN`) or the answer needs (`NEED`); nanoseconds that
            the run took (`DONE`); an error's number (`FORKED`); the system's status of a process (`REAPED`).
    """

    kind: MessageKind
    model: int = 0
    tensors: int = 0
    text_bytes: int = 0
    number: int = 0
    begin: int = 0
    size: int = 0
    figure: int = 0


class TensorPlace(NamedTuple):
    """Where a tensor lies: what its offset counts from, the offset, and its shape."""

    base: int
    offset: int
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """Where the tensors of a message go: `text` is the places as bytes.

    Attributes:
        copied: Positions of those that are copied into the packet or the slot's region.
        slot_bytes: Where they end in the region; 0 if none is needed.
    """

    text: bytes
    places: tuple[TensorPlace, ...]
    copied: tuple[int, ...]
    slot_bytes: int


@functools.lru_cache(_MAX_CACHED)
def lay_out(
    shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    offsets: tuple[int | None, ...] | None = None,
) -> Layout:
    """Returns where tensors go: to the packet if they are small together, else to the slot's region.

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
        places.append(TensorPlace(IN_PACKET if is_inline else IN_SLOT, end, shape))
        end += _align(size)
    return Layout(_encode_places(places), tuple(places), copied, 0 if is_inline else end)


@functools.lru_cache(_MAX_CACHED)
def fit_into(layout: Layout, begin: int, size: int) -> Layout | None:
    """Returns where tensors lie in a region of some bytes, from `begin`; None if they do not fit."""
    if begin + layout.slot_bytes > size:
        return None
    places = tuple(
        [
            place._replace(offset=place.offset + begin) if place.base == IN_SLOT else place
            for place in layout.places
        ]
    )
    return layout._replace(text=_encode_places(places), places=places)


def _encode_places(places: Sequence[TensorPlace]) -> bytes:
    return b"".join(
        _PLACE.pack(base, len(shape), offset) + struct.pack(f"<{len(shape)}Q", *shape)
        for base, offset, shape in places
    )


def encode_tensors(kind: MessageKind, number: int, layout: Layout, **fields: int) -> bytes:
    """Returns head and places of a message with tensors; `fields` are others of `Head`."""
    return encode_head(kind, number, tensors=len(layout.places), text_bytes=len(layout.text), **fields) + (
        layout.text
    )


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


class PlaceReader:
    """Reads where the tensors of a model's messages lie; batch after batch it is the same."""

    def __init__(self, itemsizes: Sequence[int], subject: str) -> None:
        self._itemsizes, self._subject = tuple(itemsizes), subject
        self._known: dict[bytes, tuple[tuple[TensorPlace, ...], tuple[int, ...]]] = {}

    def read(self, packet: memoryview, head: Head, region_bytes: int) -> tuple[TensorPlace, ...]:
        """Returns the places; those in the packet or in a slot's region of some bytes lie inside of it.

        Raises:
            PoolError: They are cut short, contradict themselves, or lie outside.
        """
        text = bytes(packet[HEAD_BYTES : HEAD_BYTES + head.text_bytes])
        decoded = self._known.get(text)
        if decoded is None:
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            decoded = self._known[text] = self._decode(text, head.tensors)
        limits, used = (len(packet), region_bytes), [0, 0, 0]
        for place, size in zip(*decoded, strict=True):
            used[place.base] += size  # tensors that overlap would be copied more than once
            if place.base <= IN_SLOT and max(place.offset + size, used[place.base]) > limits[place.base]:
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
        if position != len(text):
            raise PoolError(f"{self._subject} has {len(text) - position} bytes too many")
        return tuple(places), tuple(sizes)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
