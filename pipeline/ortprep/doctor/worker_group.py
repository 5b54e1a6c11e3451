"""Workers of a model at once: sessions in forked processes that wait for each other."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Barrier, BrokenBarrierError
from typing import Any, NamedTuple

from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.children.process_group import end_with_parent
from ortprep.errors import ChildError, LoadError
from ortprep.runtime.loading.session import build_session, onnxruntime_errors
from ortprep.runtime.machine.memory import private_bytes
from ortprep.runtime.tensors.arrays import read_tensors, run_session

CHILD_TIMEOUT_S = 24 * 3600.0
"""Timeout of a group, in seconds: a model may take an hour to load, and a group loads it several times."""

_MB = 2**20
_WARM_UP_RUNS = _MIN_RUNS = 3


class _Meeting(NamedTuple):
    """Points where the processes of a group wait for each other.

    Attributes:
        barrier: Waits until all are there; it breaks when one of them fails.
        measuring: A shared number: how many have not measured all their runs yet.
    """

    barrier: Barrier
    measuring: Any


@dataclass(frozen=True)
class ProcessFigures:
    """Figures of one process; times are `time.monotonic()`, one clock for all processes."""

    ready_s: float
    private_mb: float
    runs_ms: tuple[float, ...]


@dataclass(frozen=True)
class GroupFigures:
    """Figures of several sessions, in all their processes together.

    Attributes:
        ready_ms: Time from before the first process is forked until the last session is ready.
        private_mb: Anonymous memory with all sessions there.
        run_ms: Median run of all sessions.
        runs_per_s: Runs of all sessions per second.
    """

    ready_ms: float
    private_mb: float
    run_ms: float
    runs_per_s: float


def measure_group(plan: SessionPlan, sample: str, workers: int, *, window_s: float) -> GroupFigures:
    """Makes and runs sessions at once, in a process each.

    Args:
        plan: Plan of each session.
        sample: Input that they are run on.
        workers: Number of processes.
        window_s: Time that each session is run, in seconds.

    Raises:
        PipelineError: A session could not be made or did not run, or a process died.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    return run_child(start_group, (plan, sample, workers, window_s), timeout_s=CHILD_TIMEOUT_S).value


def start_group(request: tuple[SessionPlan, str, int, float]) -> GroupFigures:
    """Child function of `measure_group`: forks the processes, which import ONNX Runtime themselves.

    The kernel ends them with this process, so none is left that waits for the others.

    Raises:
        LoadError: A session cannot be made, or does not run.
        ChildError: A process died.
    """
    plan, sample, workers, window_s = request
    context = multiprocessing.get_context("fork")
    meeting = _Meeting(context.Barrier(workers), context.Value("i", workers))
    started_s = time.monotonic()
    with ProcessPoolExecutor(workers, context, _join_group, (meeting, os.getpid())) as pool:
        futures = [pool.submit(use_session, plan, sample, window_s) for _ in range(workers)]
        errors = [error for one in futures if (error := one.exception()) is not None]
    if errors:
        error = min(errors, key=lambda one: isinstance(one, BrokenBarrierError))  # which is another's failure
        raise ChildError("a worker died") if isinstance(error, BrokenProcessPool) else error
    processes = [one.result() for one in futures]
    return GroupFigures(
        ready_ms=(max(each.ready_s for each in processes) - started_s) * 1e3,
        private_mb=sum(each.private_mb for each in processes),
        run_ms=median(median(each.runs_ms) for each in processes),
        runs_per_s=sum(len(each.runs_ms) / sum(each.runs_ms) * 1e3 for each in processes),
    )


def _join_group(meeting: _Meeting, parent: int) -> None:
    """Prepares a process of a group, which ends with its parent."""
    global _meeting
    _meeting = meeting
    end_with_parent(parent)


_meeting: _Meeting
"""Meeting of the group that this process belongs to; set by `_join_group`."""


def use_session(plan: SessionPlan, sample: str, window_s: float) -> ProcessFigures:
    """Makes a session in a process of a group, and runs it for a time once all others have theirs.

    Raises:
        LoadError: The session cannot be made, or does not run.
        BrokenBarrierError: Another process failed.
    """
    barrier = _meeting.barrier
    try:
        session = build_session(plan)
        ready_s = time.monotonic()
        # Otherwise the last figures would include memory that others give back, and their exit.
        barrier.wait()
        memory_mb = private_bytes() / _MB
        feeds = read_tensors(Path(sample))
        runs_ms = _measure(lambda: run_session(session, feeds), window_s)
    except BaseException as error:  # also an interruption: the others would wait for ever
        barrier.abort()
        if isinstance(error, onnxruntime_errors()) and not isinstance(error, BrokenBarrierError):
            problem = f"ONNX Runtime cannot run {plan.model}\n  {type(error).__name__}: {error}"
            raise LoadError(problem) from error
        raise
    return ProcessFigures(ready_s, memory_mb, runs_ms)


def _measure(run: Callable[[], object], window_s: float) -> tuple[float, ...]:
    """Returns the duration of each run in the window, which all processes of the group share."""
    barrier, measuring = _meeting
    for _ in range(_WARM_UP_RUNS):
        run()
    barrier.wait()
    run_ms: list[float] = []
    now_s = begun_s = time.perf_counter()
    while len(run_ms) < _MIN_RUNS or now_s < begun_s + window_s:
        run()
        before_s, now_s = now_s, time.perf_counter()
        run_ms.append((now_s - before_s) * 1e3)
    with measuring.get_lock():
        measuring.value -= 1
    # Runs on until nobody measures: the slowest would otherwise be measured on an idle machine.
    while measuring.value and not barrier.broken:
        run()
    return tuple(run_ms)
