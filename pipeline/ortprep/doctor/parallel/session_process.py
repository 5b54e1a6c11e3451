"""The process that makes one or more sessions and runs them: one after another, or in a thread each."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.doctor.process_group import Barrier, join, run_in_threads, run_together
from ortprep.errors import LoadError
from ortprep.runtime.loading.session import build_session, import_onnxruntime, onnxruntime_errors
from ortprep.runtime.machine.process_memory import private_bytes
from ortprep.runtime.tensors.arrays import read_tensors, run_session

_MB = 2**20
_WARM_UP_RUNS = 3
_MIN_RUNS = 3

Load = tuple[SessionPlan, str]
"""Plan of a session, and the sample it is run on."""


@dataclass(frozen=True)
class GroupFigures:
    """What several sessions took, in all their processes together.

    Attributes:
        onnxruntime: Version.
        ready_ms: Time from before the first process starts until the last session is ready.
        start_ms: Part of it until the last process has imported ONNX Runtime.
        creating_ms: Time from the first session begun to the last ready.
        private_mb: Anonymous memory with all sessions there.
        run_ms: Median run of each session.
        runs_per_s: Runs of all sessions per second; of sessions that ran at once.
    """

    onnxruntime: str
    ready_ms: float
    start_ms: float
    creating_ms: float
    private_mb: float
    run_ms: tuple[float, ...]
    runs_per_s: float


@dataclass(frozen=True)
class _ProcessFigures:
    """What one process took; times are `time.monotonic()`, one clock for all processes."""

    onnxruntime: str
    imported_s: float
    begun_s: tuple[float, ...]
    ready_s: tuple[float, ...]
    private_mb: float
    runs_ms: tuple[tuple[float, ...], ...]


def measure_group(shares: Sequence[Sequence[Load]], *, at_once: bool, window_s: float) -> GroupFigures:
    """Makes and runs sessions in a fresh process for each share of them.

    Args:
        shares: What each process loads.
        at_once: Whether sessions of one process are made and run in a thread each, or one after another.
        window_s: How long each session is run, in seconds.

    Raises:
        PipelineError: A session could not be made or did not run, or a process died.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    requests = [
        {
            "plans": [plan for plan, _ in share],
            "samples": [sample for _, sample in share],
            "at_once": at_once,
            "window_s": window_s,
        }
        for share in shares
    ]
    started_s, values = run_together(use_sessions, requests, participants=sum(map(len, shares)))
    processes = [decode(_ProcessFigures, value) for value in values]
    ready_s = max(time for each in processes for time in each.ready_s)
    begun_s = min(time for each in processes for time in each.begun_s)
    runs_ms = [runs for each in processes for runs in each.runs_ms]
    return GroupFigures(
        onnxruntime=processes[0].onnxruntime,
        ready_ms=(ready_s - started_s) * 1e3,
        start_ms=(max(each.imported_s for each in processes) - started_s) * 1e3,
        creating_ms=(ready_s - begun_s) * 1e3,
        private_mb=sum(each.private_mb for each in processes),
        run_ms=tuple(median(runs) for runs in runs_ms),
        runs_per_s=sum(len(runs) / sum(runs) * 1e3 for runs in runs_ms),
    )


def use_sessions(request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes sessions, keeps them until all other processes have theirs, and runs them; runs in a child.

    Args:
        request: `plans`, `samples`, `at_once` and `window_s`, as `measure_group` takes them; a session is one
            participant of the barrier.

    Returns:
        The fields of `_ProcessFigures`.

    Raises:
        LoadError: A session cannot be made, or does not run.
        ChildError: Another process failed.
    """
    barrier = join(request)
    onnxruntime = import_onnxruntime()
    imported_s = time.monotonic()
    plans = decode(tuple[SessionPlan, ...], request["plans"])
    at_once, window_s = request["at_once"], request["window_s"]
    start = threading.Barrier(len(plans)) if at_once else None
    made = _call_all([functools.partial(_make, plan, start) for plan in plans], at_once=at_once)
    for _ in plans:
        barrier.arrive("ready")
    # Otherwise the last figures would include memory that others give back, and their exit.
    barrier.wait_for("ready")
    memory_mb = private_bytes() / _MB
    samples = [Path(sample) for sample in request["samples"]]
    runs = [
        _runner(session, plan.model, sample)
        for (_, _, session), plan, sample in zip(made, plans, samples, strict=True)
    ]
    shared = barrier if at_once else None
    runs_ms = _call_all([functools.partial(_measure, run, shared, window_s) for run in runs], at_once=at_once)
    begun_s, ready_s, _ = zip(*made, strict=True)
    figures = _ProcessFigures(
        onnxruntime.__version__, imported_s, begun_s, ready_s, memory_mb, tuple(runs_ms)
    )
    return dict(encode(figures))


def _call_all(functions: Sequence[Callable[[], Any]], *, at_once: bool) -> list[Any]:
    return run_in_threads(functions) if at_once else [function() for function in functions]


def _make(plan: SessionPlan, start: threading.Barrier | None) -> tuple[float, float, Any]:
    """Returns when a session was begun, when it was ready, and the session."""
    if start is not None:
        start.wait()
    begun_s = time.monotonic()
    session = build_session(plan, take_turns=False)
    return begun_s, time.monotonic(), session


def _runner(session: Any, model: str, sample: Path) -> Callable[[], object]:
    """Returns a function that runs a session once."""
    feeds, refusals = read_tensors(sample), onnxruntime_errors()

    def run() -> object:
        try:
            return run_session(session, feeds)
        except refusals as error:
            raise LoadError(f"ONNX Runtime cannot run {model}\n  {type(error).__name__}: {error}") from error

    return run


def _measure(run: Callable[[], object], barrier: Barrier | None, window_s: float) -> tuple[float, ...]:
    """Returns the duration of each run in the window, which all participants of a barrier share."""
    for _ in range(_WARM_UP_RUNS):
        run()
    if barrier is not None:
        barrier.wait("warm")
    run_ms: list[float] = []
    now_s = begun_s = time.perf_counter()
    while len(run_ms) < _MIN_RUNS or now_s < begun_s + window_s:
        run()
        before_s, now_s = now_s, time.perf_counter()
        run_ms.append((now_s - before_s) * 1e3)
    if barrier is not None:
        # Runs on until nobody measures: the slowest would otherwise be measured on an idle machine.
        barrier.arrive("measured")
        while not barrier.is_complete("measured"):
            run()
    return tuple(run_ms)
