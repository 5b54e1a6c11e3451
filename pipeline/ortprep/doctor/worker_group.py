"""Workers of a model at once: sessions in fresh processes that wait for each other."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.errors import LoadError
from ortprep.runtime.loading.session import (
    build_session,
    onnxruntime_errors,
)
from ortprep.runtime.machine.memory import private_bytes
from ortprep.runtime.tensors.arrays import read_tensors, run_session

CHILD_TIMEOUT_S = 24 * 3600.0
"""Timeout of a group, in seconds: a model may take an hour to load, and a group loads it several times."""

R = TypeVar("R")

_MB = 2**20
_WARM_UP_RUNS = _MIN_RUNS = 3
_POLL_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class Barrier:
    """Named meeting points of several processes: one file each, a byte longer per arrival.

    A wait has no timeout: all processes of a group end with the one that started them.

    Attributes:
        folder: Shared by all participants.
        participants: Number of processes.
    """

    folder: Path
    participants: int

    def arrive(self, point: str) -> None:
        """Counts this participant as arrived, without waiting."""
        with (self.folder / point).open("ab", buffering=0) as file:
            file.write(b".")

    def is_complete(self, point: str) -> bool:
        """Says whether all participants have arrived."""
        try:
            return (self.folder / point).stat().st_size >= self.participants
        except FileNotFoundError:
            return False

    def wait(self, point: str) -> None:
        """Arrives and waits for the others, to about a millisecond."""
        self.arrive(point)
        while not self.is_complete(point):
            time.sleep(_POLL_INTERVAL_S)


def run_in_threads(functions: Sequence[Callable[[], R]]) -> list[R]:
    """Calls every function in a thread of its own; returns their results, or raises the first error at once.

    The threads are daemons, so that those that wait for one that failed do not keep the process.
    """
    answers: queue.SimpleQueue[tuple[int, R | BaseException]] = queue.SimpleQueue()

    def call(index: int, function: Callable[[], R]) -> None:
        try:
            answers.put((index, function()))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            answers.put((index, error))

    for index, function in enumerate(functions):
        threading.Thread(target=call, args=(index, function), daemon=True).start()
    results: dict[int, R] = {}
    while len(results) < len(functions):
        index, answer = answers.get()
        if isinstance(answer, BaseException):
            raise answer
        results[index] = answer
    return [results[index] for index in range(len(functions))]


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
        ready_ms: Time from before the first process starts until the last session is ready.
        private_mb: Anonymous memory with all sessions there.
        run_ms: Median run of all sessions.
        runs_per_s: Runs of all sessions per second.
    """

    ready_ms: float
    private_mb: float
    run_ms: float
    runs_per_s: float


def measure_group(plan: SessionPlan, sample: str, workers: int, *, window_s: float) -> GroupFigures:
    """Makes and runs sessions at once, in a fresh process each.

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
    """Child function of `measure_group`: starts the processes.

    The kernel ends them with this process. So if one fails, or `measure_group` is interrupted, none is left
    that waits for the others.
    """
    plan, sample, workers, window_s = request
    barrier = Barrier(Path(tempfile.gettempdir()), workers)
    started_s = time.monotonic()

    def run_worker() -> ProcessFigures:
        # Without a timeout, whose thread would keep this process when another worker has failed.
        return run_child(use_session, (plan, sample, window_s, barrier)).value

    processes = run_in_threads([run_worker] * workers)
    return GroupFigures(
        ready_ms=(max(each.ready_s for each in processes) - started_s) * 1e3,
        private_mb=sum(each.private_mb for each in processes),
        run_ms=median(median(each.runs_ms) for each in processes),
        runs_per_s=sum(len(each.runs_ms) / sum(each.runs_ms) * 1e3 for each in processes),
    )


def use_session(request: tuple[SessionPlan, str, float, Barrier]) -> ProcessFigures:
    """Child function: makes a session, keeps it until all other processes have theirs, and runs it.

    The request is the session's plan, its sample, the time that it is run, and the processes' barrier.

    Raises:
        LoadError: The session cannot be made, or does not run.
    """
    plan, sample, window_s, barrier = request
    session = build_session(plan)
    ready_s = time.monotonic()
    # Otherwise the last figures would include memory that others give back, and their exit.
    barrier.wait("ready")
    memory_mb = private_bytes() / _MB
    runs_ms = _measure(_runner(session, plan.model, Path(sample)), barrier, window_s)
    return ProcessFigures(ready_s, memory_mb, runs_ms)


def _runner(session: Any, model: str, sample: Path) -> Callable[[], object]:
    """Returns a function that runs a session once."""
    feeds, refusals = read_tensors(sample), onnxruntime_errors()

    def run() -> object:
        try:
            return run_session(session, feeds)
        except refusals as error:
            raise LoadError(f"ONNX Runtime cannot run {model}\n  {type(error).__name__}: {error}") from error

    return run


def _measure(run: Callable[[], object], barrier: Barrier, window_s: float) -> tuple[float, ...]:
    """Returns the duration of each run in the window, which all participants of the barrier share."""
    for _ in range(_WARM_UP_RUNS):
        run()
    barrier.wait("warm")
    run_ms: list[float] = []
    now_s = begun_s = time.perf_counter()
    while len(run_ms) < _MIN_RUNS or now_s < begun_s + window_s:
        run()
        before_s, now_s = now_s, time.perf_counter()
        run_ms.append((now_s - before_s) * 1e3)
    # Runs on until nobody measures: the slowest would otherwise be measured on an idle machine.
    barrier.arrive("measured")
    while not barrier.is_complete("measured"):
        run()
    return tuple(run_ms)
