"""Workers of a model at once: sessions in fresh processes, or in threads of one, that wait for each other."""

from __future__ import annotations

import functools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.errors import ChildError, LoadError
from ortprep.runtime.loading.session import (
    CUDA,
    build_session,
    import_onnxruntime,
    onnxruntime_errors,
    with_device,
)
from ortprep.runtime.machine.memory import private_bytes
from ortprep.runtime.placement import Device, device_variables
from ortprep.runtime.tensors.arrays import read_tensors, run_session

CHILD_TIMEOUT_S = 24 * 3600.0
"""Timeout of one process, in seconds: a model may take an hour to load, and some checks load it several
times."""

Q = TypeVar("Q")
R = TypeVar("R")

Load = tuple[SessionPlan, str]
"""Plan of a session, and the sample it is run on."""

_MB = 2**20
_WARM_UP_RUNS = _MIN_RUNS = 3
_POLL_INTERVAL_S = 0.0005
_FOLDER, _PARTICIPANTS = "ORTPREP_BARRIER", "ORTPREP_BARRIER_PARTICIPANTS"
_BROKEN = "broken"
_PID = "pid-"
"""Prefix of the files in a barrier's folder by which processes register."""


@dataclass(frozen=True)
class Barrier:
    """Named meeting points for threads of several processes: one file each, a byte longer per arrival.

    A wait has no timeout: the parent process limits the time, and kills the others when one fails.

    Attributes:
        folder: Empty at first; shared by all participants.
        participants: Number of participants, in all processes together.
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

    def join(self) -> None:
        """Registers this process, which `kill_all` can end from now on.

        Raises:
            ChildError: Another participant has failed already.
        """
        # In this order: a kill after the file is there ends this process, a kill before it is seen here.
        (self.folder / f"{_PID}{os.getpid()}").touch()
        if (self.folder / _BROKEN).exists():
            raise ChildError("another process of this measurement failed")

    def kill_all(self) -> None:
        """Kills all processes that joined, and keeps others from joining."""
        (self.folder / _BROKEN).touch()
        for file in self.folder.glob(f"{_PID}*"):
            pid = int(file.name.removeprefix(_PID))
            with suppress(ChildProcessError, ProcessLookupError):
                # Raises where the child has been reaped: its number may belong to another process by now.
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                os.killpg(pid, signal.SIGKILL)


def join() -> Barrier:
    """Returns the barrier of this process of `run_together`, which can end it from now on.

    Raises:
        ChildError: Another participant has failed already.
    """
    barrier = Barrier(Path(os.environ[_FOLDER]), int(os.environ[_PARTICIPANTS]))
    barrier.join()
    return barrier


def run_together(
    function: Callable[[Q], R], jobs: Sequence[tuple[Q, Mapping[str, str]]], *, participants: int
) -> tuple[float, list[R]]:
    """Runs a function in a fresh process for every job, all at once.

    If one fails, or this call is interrupted, all are killed: none may keep the others waiting for an hour.

    Args:
        function: A function for `run_child`; it must first `join` the barrier.
        jobs: The argument and further environment variables of each process.
        participants: Number of participants at the barrier, in all processes together.

    Returns:
        `time.monotonic()` before the first process started, a clock that all processes read; and what each
        returned, in the order of the jobs.

    Raises:
        PipelineError: Error of the first process that failed.
        ChildError: The first process that failed died, or took too long.
        OSError: There is no room on the disk for the requests or the replies.
    """
    with (
        scratch_folder("ortprep-barrier-") as folder,
        ThreadPoolExecutor(len(jobs), "ortprep-process") as threads,
    ):
        barrier = {_FOLDER: str(folder), _PARTICIPANTS: str(participants)}
        run = functools.partial(run_child, function, timeout_s=CHILD_TIMEOUT_S)
        started_s = time.monotonic()
        # BaseException: on Ctrl-C the pool would otherwise wait for the threads, and they for the processes.
        try:
            replies = [
                threads.submit(run, request, environment={**variables, **barrier})
                for request, variables in jobs
            ]
            for reply in as_completed(replies):
                reply.result()
        except BaseException:
            Barrier(folder, participants).kill_all()
            raise
        return started_s, [reply.result().value for reply in replies]


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


def isolate(plan: SessionPlan) -> tuple[SessionPlan, Mapping[str, str]]:
    """Returns a plan for a process that sees only its GPU, and that process's environment variables."""
    cuda = next((provider for provider in plan.providers if provider.name == CUDA), None)
    if cuda is None:
        return plan, {}
    device = Device("cuda", int(cuda.options.get("device_id", "0")))
    return with_device(plan, 0), device_variables(device, os.environ.get("CUDA_VISIBLE_DEVICES"))


@dataclass(frozen=True)
class SessionsRequest:
    """Sessions that one process makes and runs, in a thread each.

    Attributes:
        loads: Plans of its sessions and their samples.
        window_s: Time that each session is run, in seconds.
    """

    loads: tuple[Load, ...]
    window_s: float


@dataclass(frozen=True)
class ProcessFigures:
    """Figures of one process; times are `time.monotonic()`, one clock for all processes."""

    ready_s: tuple[float, ...]
    private_mb: float
    runs_ms: tuple[tuple[float, ...], ...]


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


def measure_group(shares: Sequence[Sequence[Load]], *, window_s: float) -> GroupFigures:
    """Makes and runs sessions at once, in a fresh process for each share of them and a thread for each.

    A process with a single session sees only the GPU of its plan, as a pool's worker does.

    Args:
        shares: Sessions of each process.
        window_s: Time that each session is run, in seconds.

    Raises:
        PipelineError: A session could not be made or did not run, or a process died.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    jobs: list[tuple[SessionsRequest, Mapping[str, str]]] = []
    for share in shares:
        loads, variables = tuple(share), dict[str, str]()
        if len(loads) == 1:
            plan, isolated = isolate(loads[0][0])
            loads, variables = ((plan, loads[0][1]),), dict(isolated)
        jobs.append((SessionsRequest(loads, window_s), variables))
    started_s, processes = run_together(use_sessions, jobs, participants=sum(map(len, shares)))
    ready_s = max(time for each in processes for time in each.ready_s)
    runs_ms = [runs for each in processes for runs in each.runs_ms]
    return GroupFigures(
        ready_ms=(ready_s - started_s) * 1e3,
        private_mb=sum(each.private_mb for each in processes),
        run_ms=median(median(runs) for runs in runs_ms),
        runs_per_s=sum(len(runs) / sum(runs) * 1e3 for runs in runs_ms),
    )


def use_sessions(request: SessionsRequest) -> ProcessFigures:
    """Makes sessions, keeps them until all other processes have theirs, and runs them; runs in a child.

    Each session is one participant of the barrier.

    Raises:
        LoadError: A session cannot be made, or does not run.
        ChildError: Another process failed.
    """
    barrier = join()
    import_onnxruntime()
    # Not one after the other has begun, nor in turns, as `load` would have threads of one device take.
    start = threading.Barrier(len(request.loads))
    made = run_in_threads([functools.partial(_make, plan, start) for plan, _ in request.loads])
    for _ in request.loads[1:]:
        barrier.arrive("ready")
    # Otherwise the last figures would include memory that others give back, and their exit.
    barrier.wait("ready")
    memory_mb = private_bytes() / _MB
    runs = [
        functools.partial(_measure, _runner(session, plan.model, Path(sample)), barrier, request.window_s)
        for (_, session), (plan, sample) in zip(made, request.loads, strict=True)
    ]
    ready_s, _ = zip(*made, strict=True)
    return ProcessFigures(ready_s, memory_mb, tuple(run_in_threads(runs)))


def _make(plan: SessionPlan, start: threading.Barrier) -> tuple[float, Any]:
    """Returns when a session was ready, and the session."""
    start.wait()
    session = build_session(plan, take_turns=False)
    return time.monotonic(), session


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
