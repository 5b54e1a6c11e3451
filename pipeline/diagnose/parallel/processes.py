"""Several child processes at once, which wait for each other and end together."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.diagnose.parallel.barrier import Barrier, was_released
from pipeline.diagnose.turns import CHILD_TIMEOUT_S
from pipeline.runtime.child import Reply, run_child

_PROCESS = "process-"
"""Beginning of the names of the files in a barrier's folder by which processes say their numbers."""


@dataclass(frozen=True)
class Answers:
    """What processes that ran at once answered.

    Attributes:
        started_s: `time.monotonic()` before the first was started; the clock is one for all processes.
        values: What each returned, in the order of the requests.
    """

    started_s: float
    values: tuple[dict[str, Any], ...]


def run_together(
    function: str,
    requests: Sequence[Mapping[str, Any]],
    *,
    participants: int,
    environments: Sequence[Mapping[str, str]] | None = None,
) -> Answers:
    """Runs `module:function` in a fresh process for every request, all at once.

    Once one fails, or this is interrupted, all are killed: none is waited for that may take an hour yet.

    Args:
        function: As `run_child` takes it; the first thing it does is to `join` its request's barrier.
        requests: JSON types; each gets `barrier`, the folder of a `Barrier`, and `participants` besides.
        participants: How many wait at that barrier, in all processes together.
        environments: Variables of each process on top of this one's; None for no more.

    Raises:
        PipelineError: What the first of them that failed said.
        ChildError: The first of them that failed died, or took too long.
        OSError: There is no room on the disk for the requests or the answers.
    """
    with (
        tempfile.TemporaryDirectory(prefix="ortprep-barrier-") as folder,
        ThreadPoolExecutor(len(requests), "ortprep-process") as threads,
    ):
        at_barrier = {"barrier": folder, "participants": participants}
        started_s = time.monotonic()
        # Of all errors: Ctrl-C would else wait for the threads, and they for what a process is at.
        try:
            replies = [
                threads.submit(
                    run_child,
                    function,
                    {**request, **at_barrier},
                    timeout_s=CHILD_TIMEOUT_S,
                    environment=environment,
                )
                for request, environment in zip(requests, environments or [{}] * len(requests), strict=True)
            ]
            return Answers(started_s, tuple(reply.value for reply in _await(replies)))
        except BaseException:
            Barrier(Path(folder), participants).give_up()
            _kill_registered(Path(folder))
            raise


def join(request: Mapping[str, Any]) -> Barrier:
    """Returns the barrier that a request of `run_together` names; from then on it can end this process.

    Raises:
        ChildError: Another participant has failed already.
    """
    barrier = Barrier(Path(request["barrier"]), request["participants"])
    # In this order: who gives up later finds the file, and who gave up before is found here.
    (barrier.folder / f"{_PROCESS}{os.getpid()}").touch()
    barrier.check()
    return barrier


def _await(replies: Sequence[Future[Reply]]) -> list[Reply]:
    """Waits for all processes; raises as soon as one fails for a reason of its own."""
    released: list[BaseException] = []
    for reply in as_completed(replies):
        error = reply.exception()
        if error is None:
            continue
        if not was_released(error):
            raise error
        released.append(error)
    if released:
        raise released[0]
    return [reply.result() for reply in replies]


def _kill_registered(folder: Path) -> None:
    for file in folder.glob(f"{_PROCESS}*"):
        pid = int(file.name.removeprefix(_PROCESS))
        with suppress(ChildProcessError, ProcessLookupError):
            # Raises where the child has been reaped, so that its number may be somebody else's by now.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            os.killpg(pid, signal.SIGKILL)
