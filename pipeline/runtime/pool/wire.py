"""What goes through the pipes between a pool and its workers: frames of 64 bytes, and JSON where it is rare.

Tensors never do; a frame says where in shared memory they lie. A frame is shorter than `PIPE_BUF`, so writing
one is atomic (POSIX.1, `write`). Whatever arrives is checked as if a stranger had sent it: a worker may have
been overwritten by the model it runs.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pipeline.errors import PoolError

_LAYOUT = struct.Struct("<IBxHQIIQQQQQ")
FRAME_BYTES = _LAYOUT.size
MAX_PAYLOAD_BYTES = 4 * 2**20
"""Largest JSON text that may follow a frame."""

_MAGIC = 0x4F525450


class Kind(enum.IntEnum):
    """What a frame is about.

    To a worker: `RUN` a request; `GRANT` or `DENY` the memory it needs for an answer; `FORGET` a segment that
    was removed; `CHECK` the golden samples; `STOP`.

    From a worker: `PHASE` of its start, with JSON; `READY`, with JSON; `BROKEN`, when it cannot start, with
    JSON; `DONE`; `NEED` memory for an answer; `FAILED`, a request, with JSON; `CHECKED`, with JSON.
    """

    RUN = 1
    GRANT = 2
    DENY = 3
    FORGET = 4
    CHECK = 5
    STOP = 6
    PHASE = 17
    READY = 18
    BROKEN = 19
    DONE = 20
    NEED = 21
    FAILED = 22
    CHECKED = 23


WITH_PAYLOAD = frozenset({Kind.PHASE, Kind.READY, Kind.BROKEN, Kind.FAILED, Kind.CHECKED})
_KINDS = {int(kind): kind for kind in Kind}


class Span(NamedTuple):
    """A piece of shared memory: a segment's number, and bytes in it. Segment 0 is none."""

    segment: int = 0
    offset: int = 0
    size: int = 0


NOWHERE = Span()


class Frame(NamedTuple):
    """One message.

    Attributes:
        kind: What it is about.
        model: Position of the model among the worker's.
        request: Number of the request, or of the segment in `FORGET`.
        first: Of `RUN`, the inputs' headers; of `DONE`, the outputs'.
        second: Of `RUN` and `GRANT`, memory for the outputs; of `NEED` its size is what is needed; of `DONE`
            its size is how many bytes the worker copied.
        extra: Bytes of JSON that follow, or in `DONE` the nanoseconds that the run took.
    """

    kind: Kind
    model: int = 0
    request: int = 0
    first: Span = NOWHERE
    second: Span = NOWHERE
    extra: int = 0


def encode_frame(frame: Frame) -> bytes:
    """Returns a frame's 64 bytes."""
    kind, model, request, first, second, extra = frame
    return _LAYOUT.pack(
        _MAGIC, kind, model, request, first[0], second[0], first[1], first[2], second[1], second[2], extra
    )


def encode_message(frame: Frame, content: Mapping[str, Any]) -> bytes:
    """Returns a frame and the JSON that follows it; texts that are too long are cut."""
    text = json.dumps(content).encode()
    if len(text) > MAX_PAYLOAD_BYTES:
        short = {key: value[:100_000] if isinstance(value, str) else None for key, value in content.items()}
        text = json.dumps(short).encode()
    return encode_frame(frame._replace(extra=len(text))) + text


class FrameReader:
    """Makes frames of the bytes of a pipe, however they were cut.

    Args:
        subject: Who sends, for messages.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._rest = b""

    def read(self, data: bytes) -> Iterator[tuple[Frame, bytes]]:
        """Yields every frame that is complete, with the JSON text that follows it, if any does.

        Raises:
            PoolError: What came is no frame.
        """
        data = self._rest + data if self._rest else data
        position = 0
        while len(data) - position >= FRAME_BYTES:
            frame = self._decode(data, position)
            end = position + FRAME_BYTES
            if frame.kind in WITH_PAYLOAD:
                if len(data) - end < frame.extra:
                    break
                payload, position = data[end : end + frame.extra], end + frame.extra
                yield frame, payload
            else:
                position = end
                yield frame, b""
        self._rest = data[position:]

    def _decode(self, data: bytes, position: int) -> Frame:
        magic, number, model, request, s1, s2, o1, n1, o2, n2, extra = _LAYOUT.unpack_from(data, position)
        kind = _KINDS.get(number)
        if magic != _MAGIC or kind is None or (kind in WITH_PAYLOAD and extra > MAX_PAYLOAD_BYTES):
            raise PoolError(
                f"unreadable message from {self._subject}\n"
                f"  expected a frame, got {data[position : position + 16].hex(' ')} …"
            )
        return Frame(kind, model, request, Span(s1, o1, n1), Span(s2, o2, n2), extra)


def decode_content(payload: bytes, subject: str) -> dict[str, Any]:
    """Returns the JSON object that followed a frame.

    Raises:
        PoolError: It is none.
    """
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise PoolError(f"unreadable message from {subject}\n  {error}") from error
    if not isinstance(content, dict):
        raise PoolError(f"unreadable message from {subject}\n  expected a JSON object")
    return content
