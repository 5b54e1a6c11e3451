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
from ortprep.runtime.pool import served_model, worker
from ortprep.runtime.pool.memory import pack_inline
from ortprep.runtime.pool.messages import (
    IN_FILE,
    Head,
    Layout,
    MessageKind,
    ReadyReport,
    encode,
    encode_head,
    encode_tensors,
    fit_into,
    lay_out,
)
from ortprep.runtime.pool.process import WorkerJob
from ortprep.runtime.pool.served_model import SlotMemory

EXIT, SEGFAULT, HANG, GARBAGE, WRONG_TURN, OUTSIDE, GREEDY = range(-107, -100)
INSATIABLE, SLOW, RAISE, FEW, LONG, TWICE, EMPTY, BLOCK = range(-115, -107)
Packet = bytes
_FLOATS = lay_out(((10_000,),), (40_000,))


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
            report = ReadyReport({f"{number}" * 1000: ""}, {}, {}, 0)
            own.send(encode(MessageKind.READY, 0, encode_record(report)))
        time.sleep(3600)


def second_of_two_exits(job: WorkerJob) -> None:
    """Exits if it is not the first to come up, by a file in the bundle's folder."""
    try:
        os.close(os.open(Path(job.models[0].bundle) / "first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        exits(job)
    worker.main(job)


def goes_wrong_when_asked(job: WorkerJob) -> None:
    """Serves, and does what a request's first element says if that is one of the numbers above."""
    serve = served_model.ServedModel.run

    def run(self: served_model.ServedModel, head: Head, packet: memoryview, memory: SlotMemory) -> Packet:
        places = self._reader.read(packet, head, head.size)
        array = memory.read(places[0], self._inputs[0][1], packet, head)
        wish = int(array.flat[0]) if array.size else 0
        if wish in _DEEDS:
            done = _DEEDS[wish](head, memory, job)
            if done is not None:
                return done
        return serve(self, head, packet, memory)

    served_model.ServedModel.run = run  # type: ignore[method-assign]
    worker.main(job)


def cannot_bind(job: WorkerJob) -> None:
    """Has ONNX Runtime refuse to bind inputs, as it does where there is no room on a GPU to copy them to."""

    import onnxruntime

    def bind(*_: Any) -> None:
        raise RuntimeError("no room to bind to")

    onnxruntime.IOBinding.bind_cpu_input = bind
    worker.main(job)


def cannot_be_forked(job: WorkerJob) -> None:
    served_model.ServedModel.find_unfit = lambda self: "it says so"  # type: ignore[method-assign]
    worker.main(job)


def answers_wrongly_when_told(job: WorkerJob) -> None:
    """Fails its check as soon as there is a file `wrong` beside the bundle, which it removes."""

    def check(self: served_model.ServedModel) -> None:
        flag = Path(job.models[0].bundle).with_name("wrong")
        if flag.exists():
            flag.unlink()
            raise LoadError("y: expected 2.0, got 3.0")

    served_model.ServedModel.check = check  # type: ignore[method-assign]
    worker.main(job)


def hangs_when_checked(job: WorkerJob) -> None:
    served_model.ServedModel.check = hangs  # type: ignore[assignment,method-assign]
    worker.main(job)


def _exit(*_: Any) -> None:
    sys.stderr.write("exiting as asked\n")
    sys.stderr.flush()
    os._exit(7)


def _segfault(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(head: Head, memory: SlotMemory, job: WorkerJob) -> None:
    hangs(job)


def _babble(head: Head, memory: SlotMemory, job: WorkerJob) -> None:
    os.write(job.descriptors[0], b"garbage" * 20)
    time.sleep(3600)


def _send_nothing(head: Head, memory: SlotMemory, job: WorkerJob) -> None:
    with socket.socket(fileno=os.dup(job.descriptors[0])) as own:
        own.send(b"")
    time.sleep(3600)


def _answer_another(head: Head, memory: SlotMemory, job: WorkerJob) -> None:
    os.write(job.descriptors[0], encode_tensors(MessageKind.DONE, head.number + 1, _FLOATS, figure=1))
    time.sleep(3600)


def _answer_twice(head: Head, memory: SlotMemory, job: WorkerJob) -> Packet:
    layout = lay_out(((0, 1),), (0,))
    begin = encode_tensors(MessageKind.DONE, head.number, layout, figure=1)
    packet = pack_inline(begin, layout, [np.empty((0, 1), np.float32)])
    os.write(job.descriptors[0], packet)
    return packet


def _answer_outside(head: Head, memory: SlotMemory, job: WorkerJob) -> Packet:
    place = _FLOATS.places[0]._replace(base=IN_FILE)
    lying = fit_into(_FLOATS._replace(places=(place,)), 0, 2**40)
    assert lying is not None
    return encode_tensors(MessageKind.DONE, head.number, lying)


def _answer_beyond(head: Head, memory: SlotMemory, job: WorkerJob) -> Packet:
    return encode_tensors(MessageKind.DONE, head.number, _FLOATS)


def _answer_little(head: Head, memory: SlotMemory, job: WorkerJob) -> Packet:
    return encode_tensors(MessageKind.DONE, head.number, Layout(b"", (), (), 0))


def _be_greedy(head: Head, memory: SlotMemory, job: WorkerJob) -> Packet:
    layout = _FLOATS._replace(slot_bytes=2**50)
    return memory.answer(head, layout, [np.zeros(10_000, np.float32)], 1)


def _be_insatiable(head: Head, memory: SlotMemory, job: WorkerJob) -> Packet:
    packet = encode_head(MessageKind.NEED, head.number, figure=2**20)
    os.write(job.descriptors[0], packet)
    return packet


def _be_slow(*_: Any) -> None:
    time.sleep(0.3)


def unblock(bundle: Path) -> None:
    """Lets every worker that is asked to block go on, now or later."""
    bundle.with_name("unblocked").touch()


def _block(head: Head, memory: SlotMemory, job: WorkerJob) -> None:
    while not Path(job.models[0].bundle).with_name("unblocked").exists():
        time.sleep(0.005)


def _raise(*_: Any) -> None:
    raise AssertionError("a bug in the worker")


_DEEDS: dict[int, Callable[[Head, SlotMemory, WorkerJob], Packet | None]] = {
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
    LONG: _answer_beyond,
    TWICE: _answer_twice,
    EMPTY: _send_nothing,
    INSATIABLE: _be_insatiable,
    BLOCK: _block,
}
