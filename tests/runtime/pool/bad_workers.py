"""Workers that go wrong, on their way up or when a request asks them to: what crashing libraries may do.

A request asks by the value of its first element.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import LoadError
from pipeline.runtime.pool import served_model, served_session, worker
from pipeline.runtime.pool.segments import AttachedSegments
from pipeline.runtime.pool.served_session import read_tensor
from pipeline.runtime.pool.tensor_headers import HeaderReader, encode_headers
from pipeline.runtime.pool.wire import NOWHERE, Frame, Kind, Span, encode_frame

EXIT, SEGFAULT, HANG, GARBAGE, WRONG_TURN, OUTSIDE, GREEDY, SLOW, RAISE, FEW = range(-101, -111, -1)
Job = Mapping[str, Any]


def exits(job: Job) -> None:
    sys.stderr.write("out of luck\n")
    raise SystemExit(3)


def segfaults(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(job: Job) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def babbles(job: Job) -> None:
    os.write(job["descriptors"][1], b"\x00" * 500)
    time.sleep(3600)


def second_of_two_exits(job: Job) -> None:
    """Exits if it is not the first to come up, by a file in the bundle's folder."""
    try:
        os.close(os.open(Path(job["models"][0]["bundle"]) / "first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        exits(job)
    worker.main(job)


def goes_wrong_when_asked(job: Job) -> None:
    """Serves, and does what a request's first element says if that is one of the numbers above."""
    serve = served_model.ServedModel.run

    def run(self: served_model.ServedModel, frame: Frame, segments: AttachedSegments, *more: Any) -> Any:
        block = segments.bytes_of(frame.first)
        array = read_tensor(HeaderReader().read(block)[0], block, segments)
        wish = int(array.flat[0]) if array.size else 0
        if wish in _DEEDS:
            return _DEEDS[wish](self, frame, segments, job["descriptors"][1], serve, more)
        return serve(self, frame, segments, *more)

    served_model.ServedModel.run = run  # type: ignore[assignment,method-assign]
    worker.main(job)


def cannot_bind(job: Job) -> None:
    """Has ONNX Runtime refuse to bind inputs, as it does where there is no room on a GPU to copy them to."""

    def run_in_place(*_: Any) -> None:
        raise RuntimeError("no room to bind to")

    served_session.ServedSession._run_in_place = run_in_place  # type: ignore[assignment,method-assign]
    worker.main(job)


def answers_wrongly_when_told(job: Job) -> None:
    """Fails its check as soon as there is a file `wrong` beside the bundle, which it removes."""

    def check(self: served_model.ServedModel) -> None:
        flag = Path(job["models"][0]["bundle"]).with_name("wrong")
        if flag.exists():
            flag.unlink()
            raise LoadError("y: expected 2.0, got 3.0")

    served_model.ServedModel.check = check  # type: ignore[method-assign]
    worker.main(job)


def _exit(*_: Any) -> None:
    sys.stderr.write("exiting as asked\n")
    sys.stderr.flush()
    os._exit(7)


def _segfault(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(*_: Any) -> None:
    hangs({})


def _babble(self: Any, frame: Frame, segments: Any, replies: int, *_: Any) -> None:
    os.write(replies, b"garbage" * 20)
    time.sleep(3600)


def _answer_another(self: Any, frame: Frame, segments: Any, replies: int, *_: Any) -> None:
    os.write(replies, encode_frame(Frame(Kind.DONE, 0, frame.request + 1, frame.first)))
    time.sleep(3600)


def _answer_outside(self: Any, frame: Frame, *_: Any) -> tuple[Span, int, int]:
    segment, offset, size = frame.second
    return Span(segment, offset + size, 64), 0, 1


def _be_greedy(self: Any, frame: Frame, segments: Any, replies: int, serve: Any, more: Any) -> Any:
    write: Callable[[bytes], None] = more[0]
    write(encode_frame(Frame(Kind.NEED, 0, frame.request, NOWHERE, Span(0, 0, 2**50))))
    assert more[1](frame.request) is None
    return serve(self, frame, segments, *more)


def _be_slow(self: Any, frame: Frame, segments: Any, replies: int, serve: Any, more: Any) -> Any:
    time.sleep(0.3)
    return serve(self, frame, segments, *more)


def _raise(*_: Any) -> None:
    raise AssertionError("a bug in the worker")


def _answer_little(self: Any, frame: Frame, segments: Any, *_: Any) -> tuple[Span, int, int]:
    segment, offset, _size = frame.second
    text = encode_headers([])
    segments.bytes_of(Span(segment, offset, len(text)))[:] = list(text)
    return Span(segment, offset, 64), 0, 1


_DEEDS: dict[int, Callable[..., Any]] = {
    EXIT: _exit,
    SEGFAULT: _segfault,
    HANG: _hang,
    GARBAGE: _babble,
    WRONG_TURN: _answer_another,
    OUTSIDE: _answer_outside,
    GREEDY: _be_greedy,
    SLOW: _be_slow,
    RAISE: _raise,
    FEW: _answer_little,
}
