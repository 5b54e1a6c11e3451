"""Do other Python threads run while ONNX Runtime makes a session and runs it? A ticking thread shows it.

The model for this is written without the onnx package, which a runtime job does not have; field numbers are
those of `onnx.proto3`. Its weights are holes in the file: they take no room and no time to write, and are
parsed like any others.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Literal, TypeVar

import numpy as np

from ortprep.bundle.onnx_wire import encode_varint, write_graph_field, write_tensor_field
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child, scratch_folder
from ortprep.doctor.doctor_model import plan_on, with_threads
from ortprep.doctor.parallel.sessions import CHILD_TIMEOUT_S
from ortprep.runtime.loading.session import build_session, import_onnxruntime
from ortprep.runtime.tensors.arrays import read_tensors, run_session, write_tensors

T = TypeVar("T")

Verdict = Literal["held", "released", "unclear"]
"""State of the interpreter's lock during a phase."""

MIN_CALL_MS = 10.0
MIN_GAPS = 3
"""Calls shorter than this, or than so many gaps of a call known to release the lock, say nothing: a busy
machine's scheduler makes gaps of milliseconds."""

HELD_SHARE = 0.5
RELEASED_SHARE = 0.25
"""Longest gap by the call's length: from the one on it is held, up to the other released. Measured on 2 busy
cores: 0.002 to 0.1 where it is released, 0.999 where it is held."""

HELD_PACE = 0.1
"""Ticks by those of a call that is known to release the lock; below, it is held in pieces."""

_TICK_INTERVAL_S = 0.0005
_REPEATS = 3
_BUDGET_S = 3.0
_CONTROL_S = 0.06
_ROUNDS_OF_HASH = 10_000

LAYERS, _SIZE, _ROWS = 12, 2048, 96
_WEIGHT_BYTES = _SIZE * _SIZE * 4
WEIGHTS_BYTES = LAYERS * _WEIGHT_BYTES
"""192 MiB: on one core of 2024, some 50 ms to parse, 250 to initialise, 150 a run."""

_IR_VERSION, _OPSET, _FLOAT = 8, 17, 1


@dataclass(frozen=True)
class Call:
    """One call, as a ticking thread saw it.

    Attributes:
        elapsed_ms: Duration of the call.
        longest_gap_ms: Longest time within it that the other thread did not run; all of it if it never did.
        ticks: Number of times that the other thread ran within it.
    """

    elapsed_ms: float
    longest_gap_ms: float
    ticks: int

    @property
    def gap_share(self) -> float:
        """Longest gap as a share of the call's duration, from 0 to 1."""
        return self.longest_gap_ms / self.elapsed_ms

    @property
    def tick_rate(self) -> float:
        """Ticks per millisecond."""
        return self.ticks / self.elapsed_ms


@dataclass(frozen=True)
class GilObservations:
    """Calls that a process observed.

    Attributes:
        onnxruntime: Version of ONNX Runtime.
        create: Calls that made a session.
        run: Calls that ran it.
        released: Calls that are known to let other threads run while they keep a core busy.
    """

    onnxruntime: str
    create: tuple[Call, ...]
    run: tuple[Call, ...]
    released: tuple[Call, ...]


class Heartbeat:
    """A thread that notes the time about every 0.6 ms while the block runs, if the interpreter lets it."""

    def __init__(self) -> None:
        self._ticks: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="ortprep-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def observe(self, work: Callable[[], T]) -> Call:
        """Calls a function, and returns the gaps meanwhile."""
        # The thread is then in its pause: a gap from before the call does not count.
        time.sleep(4 * _TICK_INTERVAL_S)
        before = len(self._ticks)
        started_s = time.perf_counter()
        work()
        return call_between(started_s, time.perf_counter(), self._ticks[before:])

    def _tick(self) -> None:
        while not self._ended.is_set():
            self._ticks.append(time.perf_counter())
            # Not Event.wait, which would also wait for a lock that another thread may hold.
            time.sleep(_TICK_INTERVAL_S)


def call_between(started_s: float, ended_s: float, ticks: Sequence[float]) -> Call:
    """Returns a call with the gaps between the ticks within it. Pure."""
    inside = [tick for tick in ticks if started_s < tick < ended_s]
    gaps = (later - earlier for earlier, later in itertools.pairwise([started_s, *inside, ended_s]))
    return Call((ended_s - started_s) * 1e3, max(gaps) * 1e3, len(inside))


def observe_gil(device: str) -> GilObservations:
    """Watches a fresh process make and run sessions of a model that is large enough for a clear answer.

    The caller holds the device's lock.

    Args:
        device: `cpu`, or `cuda:<ordinal>` to see the making of CUDA sessions.

    Raises:
        LoadError: ONNX Runtime cannot make such a session.
        ChildError: The process died.
        OSError: There is no room on the disk for the model, the request or the reply.
    """
    with scratch_folder("ortprep-gil-") as folder:
        model, sample = write_heavy_model(folder)
        # One thread of its own leaves a core to the ticking one.
        plan = with_threads(plan_on(str(model), device), 1)
        return run_child(watch, (plan, str(sample)), timeout_s=CHILD_TIMEOUT_S).value


def watch(request: tuple[SessionPlan, str]) -> GilObservations:
    """Watches a session, and a call that is known to let other threads run; runs in a child.

    Args:
        request: Plan of the session, and a file of arrays by input name.

    Raises:
        LoadError: The session cannot be made.
    """
    plan, feeds = request[0], read_tensors(Path(request[1]))
    # This one loads libraries before the watch begins.
    session = build_session(plan)
    with Heartbeat() as heartbeat:
        return GilObservations(
            import_onnxruntime().__version__,
            create=_repeat(lambda: heartbeat.observe(lambda: build_session(plan))),
            run=_repeat(lambda: heartbeat.observe(lambda: run_session(session, feeds))),
            released=tuple(heartbeat.observe(hold_core_only) for _ in range(_REPEATS)),
        )


def hold_core_only() -> None:
    """Keeps a core busy and lets other threads run."""
    end = time.perf_counter() + _CONTROL_S
    while time.perf_counter() < end:
        hashlib.pbkdf2_hmac("sha256", b"", b"", _ROUNDS_OF_HASH)


def _repeat(observe: Callable[[], Call]) -> tuple[Call, ...]:
    """Observes a few times; a long call is clear enough after one."""
    calls: list[Call] = []
    started = time.perf_counter()
    while len(calls) < _REPEATS and time.perf_counter() - started < _BUDGET_S:
        calls.append(observe())
    return tuple(calls)


def clearest(calls: Sequence[Call]) -> Call:
    """Returns the call with the least gap for its length.

    Other work on the machine makes gaps, and never ticks: if the lock is held every call shows it, and one
    call that ticks throughout acquits all of them. (Beside a busy process and a hypervisor with other guests,
    medians of three calls that release it had gaps of 40 %.)
    """
    return min(calls, key=lambda call: call.gap_share)


def min_call_ms(released: Sequence[Call]) -> float:
    """Returns how long a call must take to say anything, by this machine's noise."""
    return max(MIN_CALL_MS, MIN_GAPS * median([call.longest_gap_ms for call in released]))


def judge(calls: Sequence[Call], *, released: Sequence[Call]) -> Verdict:
    """Says whether a phase's calls, at least one, hold the lock; by calls known to release it."""
    call, control = clearest(calls), clearest(released)
    if call.elapsed_ms < min_call_ms(released) or control.gap_share > RELEASED_SHARE:
        return "unclear"
    if call.gap_share >= HELD_SHARE or call.tick_rate < HELD_PACE * control.tick_rate:
        return "held"
    return "released" if call.gap_share <= RELEASED_SHARE else "unclear"


def judge_creation(observations: GilObservations) -> Verdict:
    """Says whether ONNX Runtime holds the lock while it makes a session."""
    return judge(observations.create, released=observations.released)


def judge_run(observations: GilObservations) -> Verdict:
    """Says whether ONNX Runtime holds the lock while a session runs."""
    return judge(observations.run, released=observations.released)


def write_heavy_model(folder: Path) -> tuple[Path, Path]:
    """Writes a chain of matrix products with inline weights, and a sample of its input.

    Returns:
        The model's file and the sample's.
    """
    model, sample = folder / "heavy.onnx", folder / "heavy.npz"
    heads = [_weight_head(f"w{layer}") for layer in range(LAYERS)]
    nodes = [_field(1, _node(f"x{layer}", f"w{layer}", f"x{layer + 1}")) for layer in range(LAYERS)]
    rest = b"".join(nodes) + _field(2, b"heavy") + _field(11, _value("x0")) + _field(12, _value(f"x{LAYERS}"))
    with model.open("wb") as file:
        file.write(_number(1, _IR_VERSION) + _field(8, _number(2, _OPSET)))
        file.write(write_graph_field(len(rest) + sum(map(len, heads)) + WEIGHTS_BYTES) + rest)
        for head in heads:
            file.write(head)
            file.seek(_WEIGHT_BYTES, 1)
        file.truncate()
    write_tensors(sample, {"x0": np.zeros((_ROWS, _SIZE), np.float32)})
    return model, sample


def _weight_head(name: str) -> bytes:
    """Returns an initializer's field without its values, which come last."""
    header = _number(1, _SIZE) * 2 + _number(2, _FLOAT) + _field(8, name.encode())
    return write_tensor_field(header=header, values_bytes=_WEIGHT_BYTES)


def _node(data: str, weight: str, output: str) -> bytes:
    names = _field(1, data.encode()) + _field(1, weight.encode()) + _field(2, output.encode())
    return names + _field(4, b"MatMul")


def _value(name: str) -> bytes:
    shape = _field(1, _number(1, _ROWS)) + _field(1, _number(1, _SIZE))
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, _FLOAT) + _field(2, shape)))


def _number(field: int, value: int) -> bytes:
    return encode_varint(field << 3) + encode_varint(value)


def _field(field: int, data: bytes) -> bytes:
    return encode_varint(field << 3 | 2) + encode_varint(len(data)) + data
