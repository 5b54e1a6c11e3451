"""Workers that go wrong, on their way up or when a request asks them to: what crashing libraries may do.

A request asks by the value of its first element.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ortprep.bundle.codec import encode as encode_record
from ortprep.errors import LoadError
from ortprep.runtime.ipc import encode_shape
from ortprep.runtime.pool import served_model, worker_main
from ortprep.runtime.pool.messages import (
    MessageKind,
    ReadyReport,
    encode,
    encode_answer,
    encode_head,
    lay_out,
)
from ortprep.runtime.pool.worker_process import WorkerJob

EXIT, SEGFAULT, HANG, GARBAGE, WRONG_TURN, OUTSIDE = range(-107, -101)
SLOW, RAISE, FEW, LONG, TWICE, EMPTY, BLOCK = range(-114, -107)
Packet = bytes
_FLOATS = lay_out(((10_000,),), (4,))


def exits(job: WorkerJob) -> None:
    sys.stderr.write("out of luck\n")
    raise SystemExit(3)


def segfaults(job: WorkerJob) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(job: WorkerJob) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def babbles(job: WorkerJob) -> None:
    os.write(job.descriptors[0], b"\x00" * 500)
    time.sleep(3600)


def floods(job: WorkerJob) -> None:
    """Says again and again that it is ready, each time in other words."""
    with socket.socket(fileno=job.descriptors[0]) as own:
        for number in range(200):
            report = ReadyReport({f"{number}" * 1000: ""}, {}, 0)
            own.send(encode(MessageKind.READY, 0, encode_record(report)))
        time.sleep(3600)


def second_of_two_exits(job: WorkerJob) -> None:
    """Exits if it is not the first to come up, by a file in the bundle's folder."""
    try:
        os.close(os.open(Path(job.models[0].bundle) / "first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        exits(job)
    worker_main.main(job)


def goes_wrong_when_asked(job: WorkerJob) -> None:
    """Serves, and does what a request's first element says if that is one of the numbers above."""
    serve = served_model.ServedModel.answer

    def answer(self, head, packet, memory):
        (array, *_), _ = self.read(head, packet, memory)
        wish = int(array.flat[0]) if array.size else 0
        if wish in _DEEDS:
            done = _DEEDS[wish](head, memory, job)
            if done is not None:
                return done
        return serve(self, head, packet, memory)

    served_model.ServedModel.answer = answer
    worker_main.main(job)


def cannot_be_forked(job: WorkerJob) -> None:
    served_model.ServedModel.find_unfit = lambda self: "it says so"  # type: ignore[method-assign]
    worker_main.main(job)


def lies_about_forks(job: WorkerJob) -> None:
    """Is a template that names another process as its fork: its pool's, the first of all, or none."""
    number = {"pool": os.getppid(), "init": 1, "none": 2**22, "huge": 2**63}[os.environ["LIE"]]
    encode = worker_main.encode_head
    lie = encode(MessageKind.FORKED, number)
    worker_main.encode_head = lambda kind, *args, **fields: (
        lie if kind is MessageKind.FORKED else encode(kind, *args, **fields)
    )
    worker_main.main(job)


def lies_about_ends(job: WorkerJob) -> None:
    """Is a template that says of the workers that it reaps that they were stopped."""
    encode = worker_main.encode_head
    worker_main.encode_head = lambda kind, number=0, **fields: encode(
        kind, number, **(fields if kind is not MessageKind.REAPED else {"figure": 0x137F})
    )
    worker_main.main(job)


def answers_wrongly_when_told(job: WorkerJob) -> None:
    """Fails its check as soon as there is a file `wrong` beside the bundle, which it removes."""

    def check(self: served_model.ServedModel) -> None:
        flag = Path(job.models[0].bundle).with_name("wrong")
        if flag.exists():
            flag.unlink()
            raise LoadError("y: expected 2.0, got 3.0")

    served_model.ServedModel.check = check  # type: ignore[method-assign]
    worker_main.main(job)


def _exit(*_: Any) -> None:
    sys.stderr.write("exiting as asked\n")
    sys.stderr.flush()
    os._exit(7)


def _segfault(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(head, memory, job):
    hangs(job)


def _babble(head, memory, job):
    os.write(job.descriptors[0], b"garbage" * 20)
    time.sleep(3600)


def _send_nothing(head, memory, job):
    with socket.socket(fileno=os.dup(job.descriptors[0])) as own:
        own.send(b"")
    time.sleep(3600)


def _answer_another(head, memory, job):
    os.write(job.descriptors[0], encode_answer(head.number + 1, _FLOATS, service_ns=1))
    time.sleep(3600)


def _answer_twice(head, memory, job):
    layout = lay_out(((0, 1),), (4,))
    packet = encode_answer(head.number, layout, [np.empty((0, 1), np.float32)], service_ns=1)
    os.write(job.descriptors[0], packet)
    return packet


def _answer_outside(head, memory, job):
    text = encode_shape((2**50,))
    return encode_head(MessageKind.DONE, head.number, text_bytes=len(text)) + text


def _answer_beyond(head, memory, job):
    text = encode_shape((10,))
    return encode_head(MessageKind.DONE, head.number, text_bytes=len(text)) + text


def _answer_little(head, memory, job):
    return encode_head(MessageKind.DONE, head.number)


def _be_slow(*_: Any) -> None:
    time.sleep(0.3)


def unblock(bundle: Path) -> None:
    """Lets every worker that is asked to block go on, now or later."""
    bundle.with_name("unblocked").touch()


def _block(head, memory, job):
    while not Path(job.models[0].bundle).with_name("unblocked").exists():
        time.sleep(0.005)


def _raise(*_: Any) -> None:
    raise AssertionError("a bug in the worker")


_DEEDS: dict[int, Callable[..., Packet | None]] = {
    EXIT: _exit,
    SEGFAULT: _segfault,
    HANG: _hang,
    GARBAGE: _babble,
    WRONG_TURN: _answer_another,
    OUTSIDE: _answer_outside,
    SLOW: _be_slow,
    RAISE: _raise,
    FEW: _answer_little,
    LONG: _answer_beyond,
    TWICE: _answer_twice,
    EMPTY: _send_nothing,
    BLOCK: _block,
}
