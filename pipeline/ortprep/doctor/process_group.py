"""Child processes that run at once, wait for each other at a barrier, and end together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from ortprep.bundle.codec import encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.children.scratch_folder import scratch_folder
from ortprep.errors import ChildError
from ortprep.runtime.loading.session import CUDA, with_device
from ortprep.runtime.placement.devices import Device
from ortprep.runtime.placement.environment import plan_environments

CHILD_TIMEOUT_S = 24 * 3600.0
"""Timeout of one process, in seconds: a model may take an hour to load, and some checks load it several
times."""

T = TypeVar("T")

ChildFunction: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]

_POLL_INTERVAL_S = 0.0005
_BROKEN = "broken"
_RELEASED = "another process or thread of this measurement failed"
_PID = "pid-"
"""Prefix of the files in a barrier's folder by which processes register."""


@dataclass(frozen=True)
class Barrier:
    """Named meeting points for threads of several processes: one file each, a byte longer per arrival.

    A wait has no timeout: the parent process limits the time, and ends the others when one fails.
    As a context manager, it breaks itself if the block fails, so that nobody waits for this participant.

    Attributes:
        folder: Empty at first; shared by all participants.
        participants: Number of participants, in all processes together.
    """

    folder: Path
    participants: int

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()

    def arrive(self, point: str) -> None:
        """Counts this participant as arrived, without waiting."""
        with (self.folder / point).open("ab", buffering=0) as file:
            file.write(b".")

    def is_complete(self, point: str) -> bool:
        """Says whether all participants have arrived.

        Raises:
            ChildError: A participant failed.
        """
        self.check()
        try:
            return (self.folder / point).stat().st_size >= self.participants
        except FileNotFoundError:
            return False

    def wait(self, point: str) -> None:
        """Arrives and waits for the others, to about a millisecond.

        Raises:
            ChildError: A participant failed.
        """
        self.arrive(point)
        while not self.is_complete(point):
            time.sleep(_POLL_INTERVAL_S)

    def check(self) -> None:
        """Raises if the barrier is broken.

        Raises:
            ChildError: A participant failed.
        """
        if (self.folder / _BROKEN).exists():
            raise ChildError(_RELEASED)

    def abort(self) -> None:
        """Breaks the barrier: every wait, now and later, raises."""
        (self.folder / _BROKEN).touch()


@dataclass(frozen=True)
class GroupResult:
    """Replies of processes that ran at once.

    Attributes:
        started_s: `time.monotonic()` before the first process started; all processes read the same clock.
        values: Return value of each process, in the order of the requests.
    """

    started_s: float
    values: tuple[dict[str, Any], ...]


def run_together(
    function: ChildFunction, requests: Sequence[Mapping[str, Any]], *, participants: int
) -> GroupResult:
    """Runs a function in a fresh process for every request, all at once.

    If one fails, or this call is interrupted, all are killed: none may keep the others waiting for an hour.

    Args:
        function: As `run_child` takes it; it must first `join` the barrier of its request.
        requests: Mappings of JSON types and records; each gets `barrier`, the folder of a `Barrier`, and
            `participants`. A request whose `plans` hold a single `SessionPlan` runs in a process that sees
            only the GPU of that plan, as a pool's worker does.
        participants: Number of participants at that barrier, in all processes together.

    Raises:
        PipelineError: Error of the first process that failed.
        ChildError: The first process that failed died, or took too long.
        OSError: There is no room on the disk for the requests or the replies.
    """
    with (
        scratch_folder("ortprep-barrier-") as folder,
        ThreadPoolExecutor(len(requests), "ortprep-process") as threads,
    ):
        at_barrier = {"barrier": str(folder), "participants": participants}
        started_s = time.monotonic()
        # BaseException: on Ctrl-C the pool would otherwise wait for the threads, and they for the processes.
        try:
            values = [threads.submit(_run, function, {**request, **at_barrier}) for request in requests]
            return GroupResult(started_s, tuple(results_of(values)))
        except BaseException:
            Barrier(folder, participants).abort()
            _kill_registered(folder)
            raise


def join(request: Mapping[str, Any]) -> Barrier:
    """Returns the barrier of a request of `run_together`, which can end this process from now on.

    Raises:
        ChildError: Another participant has failed already.
    """
    barrier = Barrier(Path(request["barrier"]), request["participants"])
    # In this order: an abort after the file is there kills this process, an abort before it is seen here.
    (barrier.folder / f"{_PID}{os.getpid()}").touch()
    barrier.check()
    return barrier


def results_of(futures: Iterable[Future[T]]) -> list[T]:
    """Returns the results of participants at one barrier, as soon as all are there or one failed by itself.

    Raises:
        BaseException: Error of the first participant that failed by itself.
    """
    submitted = list(futures)
    released: list[BaseException] = []
    for future in as_completed(submitted):
        error = future.exception()
        if error is None:
            continue
        if not was_released(error):
            raise error
        released.append(error)
    if released:
        raise released[0]
    return [future.result() for future in submitted]


def was_released(error: BaseException) -> bool:
    """Says whether a participant failed only because another one had failed."""
    return isinstance(error, ChildError) and _RELEASED in error.message


def isolate(plan: SessionPlan) -> tuple[SessionPlan, Mapping[str, str]]:
    """Returns a plan for a process that sees only its GPU, and that process's environment variables."""
    cuda = next((provider for provider in plan.providers if provider.name == CUDA), None)
    if cuda is None:
        return plan, {}
    (place,) = plan_environments(
        (Device("cuda", int(cuda.options.get("device_id", "0"))),),
        workers_per_device=1,
        processors=(0,),
        nodes=(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    return with_device(plan, place.device_id or 0), place.variables


def _run(function: ChildFunction, request: Mapping[str, Any]) -> dict[str, Any]:
    plans = list(request.get("plans", ()))
    variables: Mapping[str, str] = {}
    if len(plans) == 1:
        plans[0], variables = isolate(plans[0])
    return run_child(
        function, encode({**request, "plans": plans}), timeout_s=CHILD_TIMEOUT_S, environment=variables
    ).value


def _kill_registered(folder: Path) -> None:
    for file in folder.glob(f"{_PID}*"):
        pid = int(file.name.removeprefix(_PID))
        with suppress(ChildProcessError, ProcessLookupError):
            # Raises where the child has been reaped: its number may belong to another process by now.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            os.killpg(pid, signal.SIGKILL)
