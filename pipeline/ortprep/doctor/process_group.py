"""Child processes that run at once, wait for each other at a barrier, and end together."""

from __future__ import annotations

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
        self.wait_for(point)

    def wait_for(self, point: str) -> None:
        """Waits until all participants have arrived."""
        while not self.is_complete(point):
            time.sleep(_POLL_INTERVAL_S)


def run_together(
    function: ChildFunction, requests: Sequence[Mapping[str, Any]], *, participants: int
) -> tuple[float, list[dict[str, Any]]]:
    """Runs a function in a fresh process for every request, all at once.

    If one fails, or this call is interrupted, all are killed: none may keep the others waiting for an hour.

    Args:
        function: As `run_child` takes it; it must first `join` the barrier of its request.
        requests: Mappings of JSON types and records; each gets `barrier`, the folder of a `Barrier`, and
            `participants`. A request whose `plans` hold a single `SessionPlan` runs in a process that sees
            only the GPU of that plan, as a pool's worker does.
        participants: Number of participants at that barrier, in all processes together.

    Returns:
        `time.monotonic()` before the first process started, a clock that all processes read; and what each
        returned, in the order of the requests.

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
            replies = [threads.submit(_run, function, {**request, **at_barrier}) for request in requests]
            for reply in as_completed(replies):
                reply.result()
        except BaseException:
            kill_all(folder)
            raise
        return started_s, [reply.result() for reply in replies]


def join(request: Mapping[str, Any]) -> Barrier:
    """Returns the barrier of a request of `run_together`, which can end this process from now on.

    Raises:
        ChildError: Another participant has failed already.
    """
    folder = Path(request["barrier"])
    # In this order: a kill after the file is there ends this process, a kill before it is seen here.
    (folder / f"{_PID}{os.getpid()}").touch()
    if (folder / _BROKEN).exists():
        raise ChildError("another process of this measurement failed")
    return Barrier(folder, request["participants"])


def kill_all(folder: Path) -> None:
    """Kills all processes that joined the barrier in a folder, and keeps others from joining it."""
    (folder / _BROKEN).touch()
    for file in folder.glob(f"{_PID}*"):
        pid = int(file.name.removeprefix(_PID))
        with suppress(ChildProcessError, ProcessLookupError):
            # Raises where the child has been reaped: its number may belong to another process by now.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            os.killpg(pid, signal.SIGKILL)


def run_in_threads(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Calls every function in a thread of its own; returns their results, or raises the first error at once.

    The threads are daemons, so that those that wait for one that failed do not keep the process.
    """
    answers: queue.SimpleQueue[tuple[int, T | BaseException]] = queue.SimpleQueue()

    def call(index: int, function: Callable[[], T]) -> None:
        try:
            answers.put((index, function()))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            answers.put((index, error))

    for index, function in enumerate(functions):
        threading.Thread(target=call, args=(index, function), daemon=True).start()
    results: dict[int, T] = {}
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
    whole = encode({**request, "plans": plans})
    return run_child(function, whole, timeout_s=CHILD_TIMEOUT_S, environment=variables).value
