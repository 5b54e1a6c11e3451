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

from ortprep.bundle.codec import encode
from ortprep.runtime import packets
from ortprep.runtime.opened_model import OpenedModel
from ortprep.runtime.pool import template, worker_main
from ortprep.runtime.pool.process import WorkerJob
from ortprep.runtime.pool.report import ReadyReport

EXIT, SEGFAULT, HANG, GARBAGE, WRONG_TURN, OUTSIDE = range(-107, -101)
SLOW, RAISE, FEW, LONG, TWICE, EMPTY, BLOCK = range(-114, -107)
"""What the first element of a request asks for."""


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
    os.write(job.descriptors[2], b"\x00" * 500)
    time.sleep(3600)


def floods(job: WorkerJob) -> None:
    """Says again and again that it is ready, each time in other words."""
    with socket.socket(fileno=job.descriptors[2]) as own:
        for number in range(200):
            packets.send_json(own, packets.REPORT, encode(ReadyReport({f"{number}" * 1000: ""}, 0)))
        time.sleep(3600)


def goes_wrong_when_asked(job: WorkerJob) -> None:
    """Serves, and does what a request's first element says if that is one of the numbers above."""
    run, receive = OpenedModel.run, packets.receive
    at: dict[str, Any] = {}

    def receive_and_note(sock, *arguments):
        packet = receive(sock, *arguments)
        if packet is not None and packet.kind == packets.RUN:
            at[_wish_of(packet.arrays.values())] = sock, packet.number
        return packet

    def run_or_go_wrong(self, arrays):
        wish = _wish_of(arrays.values())
        if wish in _DEEDS:
            _DEEDS[wish](*at[wish], job)
        return run(self, arrays)

    packets.receive = receive_and_note
    OpenedModel.run = run_or_go_wrong  # type: ignore[method-assign]
    worker_main.main(job)


def _wish_of(arrays) -> int:
    (array, *_) = arrays
    return int(array.flat[0]) if array.size else 0


def cannot_be_forked(job: WorkerJob) -> None:
    OpenedModel.find_unfit = lambda self: "it says so"  # type: ignore[method-assign]
    worker_main.main(job)


class _Liar:
    """Packs other numbers than it is given."""

    size = template.ANSWER.size
    unpack = template.ANSWER.unpack

    def __init__(self, lie: Callable[[int, int], tuple[int, int]]) -> None:
        self._lie = lie

    def pack(self, number: int, figure: int) -> bytes:
        return template_answer.pack(*self._lie(number, figure))


template_answer = template.ANSWER


def lies_about_forks(job: WorkerJob) -> None:
    """Is a template that names another process as its fork: its pool's, the first of all, or none."""
    number = {"pool": os.getppid(), "init": 1, "none": 2**22, "huge": 2**62}[os.environ["LIE"]]
    template.ANSWER = _Liar(lambda pid, figure: (number, figure))  # type: ignore[assignment]
    worker_main.main(job)


def lies_about_ends(job: WorkerJob) -> None:
    """Is a template that says of the workers that it reaps that they were stopped."""
    template.ANSWER = _Liar(lambda pid, figure: (pid, 0x137F if figure else 0))  # type: ignore[assignment]
    worker_main.main(job)


def _exit(*_: Any) -> None:
    sys.stderr.write("exiting as asked\n")
    sys.stderr.flush()
    os._exit(7)


def _segfault(*_: Any) -> None:
    signal.raise_signal(signal.SIGSEGV)  # in this thread, so before it goes on


def _hang(sock, number, job):
    time.sleep(3600)


def _babble(sock, number, job):
    sock.send(b"garbage" * 20)
    time.sleep(3600)


def _send_nothing(sock, number, job):
    sock.send(b"")
    time.sleep(3600)


def _answer(sock, number, names="y", dtype=np.float32):
    outputs = {name: np.zeros((0, 1), dtype) for name in names}
    packets.send_arrays(sock, packets.DONE, outputs, number=number)


def _answer_another(sock, number, job):
    _answer(sock, number + 1)
    time.sleep(3600)


def _answer_twice(sock, number, job):
    _answer(sock, number)


def _answer_with_other_types(sock, number, job):
    _answer(sock, number, dtype=np.float64)
    time.sleep(3600)


def _answer_beyond(sock, number, job):
    """Says that its outputs lie where no memory is."""
    text, _ = packets._encode_text((("y", np.dtype(np.float32), (2**40,)),))
    packets.send(sock, packets.DONE, text, arrays=1, number=number)
    time.sleep(3600)


def _answer_little(sock, number, job):
    _answer(sock, number, names="")
    time.sleep(3600)


def _be_slow(*_: Any) -> None:
    time.sleep(0.3)


def unblock(bundle: Path) -> None:
    """Lets every worker that is asked to block go on, now or later."""
    bundle.with_name("unblocked").touch()


def _block(sock, number, job):
    Path(job.models[0].bundle).with_name("blocked").touch()
    while not Path(job.models[0].bundle).with_name("unblocked").exists():
        time.sleep(0.005)


def _raise(*_: Any) -> None:
    raise AssertionError("a bug in the worker")


_DEEDS: dict[int, Callable[..., None]] = {
    EXIT: _exit,
    SEGFAULT: _segfault,
    HANG: _hang,
    GARBAGE: _babble,
    WRONG_TURN: _answer_another,
    OUTSIDE: _answer_with_other_types,
    SLOW: _be_slow,
    RAISE: _raise,
    FEW: _answer_little,
    LONG: _answer_beyond,
    TWICE: _answer_twice,
    EMPTY: _send_nothing,
    BLOCK: _block,
}
