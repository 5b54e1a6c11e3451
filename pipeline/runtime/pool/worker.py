"""What runs in a worker: it makes its sessions, then answers one request after the other.

Whatever goes wrong with a request is its answer; whatever goes wrong with the worker ends the process, and
the pool knows what to do.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.runtime.loading.session import import_onnxruntime
from pipeline.runtime.pool.wire import (
    FRAME_BYTES,
    Frame,
    FrameReader,
    Kind,
    Span,
    encode_frame,
    encode_message,
)

if TYPE_CHECKING:
    from pipeline.runtime.pool.served_model import ServedModel

_READ_BYTES = FRAME_BYTES * 64
_SPIN_S = 0.0002
_TAKEN_AT = 4  # `tensor_headers.TAKEN_AT`; this module is imported before numpy may be


class Line:
    """The worker's end of its pipes.

    Args:
        requests: Descriptor to read frames from.
        replies: Descriptor to write frames to.
        may_spin: Whether to look for the next frame for a moment before sleeping, where nobody else needs the
            core: waking up, and running on cold caches, takes longer than most small requests.
    """

    def __init__(self, requests: int, replies: int, *, may_spin: bool = False) -> None:
        self._requests, self._replies = requests, replies
        self._spin_s = _SPIN_S if may_spin else 0.0
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        os.set_blocking(requests, False)
        self._reader = FrameReader("the pool")
        self._waiting: deque[Frame] = deque()

    def read(self) -> Frame:
        """Returns the next frame; `STOP` where the pool has closed the pipe."""
        while not self._waiting:
            data = self._read()
            if not data:
                return Frame(Kind.STOP)
            self._waiting.extend([frame for frame, _ in self._reader.read(data)])
        return self._waiting.popleft()

    def _read(self) -> bytes:
        """Returns what is in the pipe, as soon as something is; b"" if the pool has closed it."""
        until = time.perf_counter() + self._spin_s if self._spin_s else 0.0
        while True:
            try:
                return os.read(self._requests, _READ_BYTES)
            except BlockingIOError:
                if time.perf_counter() >= until:
                    self._poll.poll()

    def wait_for_memory(self, request: int) -> Span | None:
        """Returns the memory that was asked for, None if there is none; other frames wait meanwhile."""
        passed: list[Frame] = []
        while True:
            frame = self.read()
            if frame.kind is Kind.STOP:
                raise SystemExit(0)
            if frame.request == request and frame.kind in (Kind.GRANT, Kind.DENY):
                self._waiting.extendleft(reversed(passed))
                return frame.second if frame.kind is Kind.GRANT else None
            passed.append(frame)

    def write(self, data: bytes) -> None:
        """Writes all of it."""
        while data:
            data = data[os.write(self._replies, data) :]

    def tell(self, kind: Kind, content: Mapping[str, Any], *, request: int = 0) -> None:
        """Writes a frame with JSON."""
        self.write(encode_message(Frame(kind, 0, request), content))


def main(job: Mapping[str, Any]) -> None:
    """Begins: makes the sessions a job names, and serves them until the pool has no more to ask.

    Args:
        job: As `start_process` got it: `models`, `prefix`, `device_id`, `threads`, `may_spin`, `processors`,
            `digests`, `descriptors`.
    """
    begun = time.perf_counter()
    line = Line(job["descriptors"][0], job["descriptors"][1], may_spin=job["may_spin"])
    if job["processors"]:
        with suppress(OSError):  # they may have been taken away since; anywhere is better than nowhere
            os.sched_setaffinity(0, job["processors"])
    try:
        phases, models = _open_models(job, line)
    except PipelineError as error:
        line.tell(Kind.BROKEN, describe_error(error))
        return
    from pipeline.runtime.memory import private_bytes

    line.tell(
        Kind.READY,
        {
            "phases": phases,
            "total_s": time.perf_counter() - begun,
            "private_bytes": private_bytes(),
            "variants": {model.name: model.variant for model in models},
            "buckets": {model.name: model.buckets for model in models},
        },
    )
    serve(line, models, job["prefix"])


def _open_models(job: Mapping[str, Any], line: Line) -> tuple[dict[str, float], list[ServedModel]]:
    started = time.perf_counter()
    import_onnxruntime()
    # Only then: what imports numpy while another thread does may find half of it.
    from pipeline.runtime.pool.served_model import open_model

    phases = {"import": time.perf_counter() - started}
    line.tell(Kind.PHASE, {"phase": "import", "seconds": phases["import"]})
    models = []
    for model in job["models"]:
        started = time.perf_counter()
        models.append(open_model(model, job))
        phases[model["name"]] = time.perf_counter() - started
        line.tell(Kind.PHASE, {"phase": model["name"], "seconds": phases[model["name"]]})
    return phases, models


def serve(line: Line, models: list[ServedModel], prefix: str) -> None:
    """Answers frames until there are no more."""
    from pipeline.runtime.pool.segments import AttachedSegments

    segments = AttachedSegments(prefix)
    while True:
        frame = line.read()
        if frame.kind is Kind.RUN:
            line.write(_run(frame, models[frame.model], segments, line))
        elif frame.kind is Kind.FORGET:
            segments.forget(frame.request)
        elif frame.kind is Kind.CHECK:
            line.tell(Kind.CHECKED, _check(models), request=frame.request)
        elif frame.kind is Kind.STOP:
            return


def _run(frame: Frame, model: ServedModel, segments: Any, line: Line) -> bytes:
    try:
        segments.bytes_of(frame.first)[_TAKEN_AT] = 1
        answer, copied, nanoseconds = model.run(frame, segments, line.write, line.wait_for_memory)
    except (PipelineError, MemoryError) as error:
        return encode_message(Frame(Kind.FAILED, frame.model, frame.request), describe_error(error))
    return encode_frame(Frame(Kind.DONE, frame.model, frame.request, answer, Span(0, 0, copied), nanoseconds))


def _check(models: list[ServedModel]) -> dict[str, Any]:
    try:
        for model in models:
            model.check()
    except PipelineError as error:
        return describe_error(error)
    return {}


def describe_error(error: BaseException) -> dict[str, Any]:
    """Returns an error as JSON types: `kind`, `message`, `hint`."""
    if isinstance(error, PipelineError):
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"kind": "RunError", "message": f"{type(error).__name__}: {error}", "hint": None}
