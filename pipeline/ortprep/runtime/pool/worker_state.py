"""Workers across restarts of their processes, and what a pool reports of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ortprep.errors import PipelineError, WorkerDiedError, describe_exit
from ortprep.quoting import printable
from ortprep.runtime.pool.worker_process import WorkerJob, WorkerProcess

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 10.0
_STEADY_S = 30.0
_LATENCIES = 2048
_LINES, _LINE_CHARACTERS = 20, 2000

WorkerStatus = Literal["starting", "ready", "waiting", "failed", "stopped"]
"""`waiting`: to be started again; `failed`: given up."""


@dataclass(frozen=True)
class WorkerEvent:
    """Something that happened to a worker, to be shown.

    Attributes:
        worker: Its number.
        name: Its name.
        state: Its new state.
        error: Why it failed or died, None if it did not.
    """

    worker: int
    name: str
    state: WorkerStatus
    error: PipelineError | None = None


@dataclass(frozen=True)
class WorkerStats:
    """A worker at one moment.

    Attributes:
        number: From 0.
        name: Its device and its number there: `cpu/0`, `cuda:1/0`.
        device: Its device.
        models: The models that it serves.
        variants: Its variant of each model.
        buckets: Its shape buckets, by model.
        state: What it is doing.
        pid: Its process; None without one.
        start_s: Duration of its last start, process creation included; None before it was ready.
        private_bytes: Its anonymous memory when it was ready; of a fork, what it had written to by then.
        served: Requests it answered.
        in_flight: Requests it has.
        restarts: How often it was started again.
        p50_ms: Median time of its last requests, from call to answer; None without any.
        p99_ms: 99th percentile of the same.
        error: Why it last failed or died.
    """

    number: int
    name: str
    device: str
    models: tuple[str, ...]
    variants: Mapping[str, str] = field(default_factory=dict)
    buckets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    state: WorkerStatus = "waiting"
    pid: int | None = None
    start_s: float | None = None
    private_bytes: int | None = None
    served: int = 0
    in_flight: int = 0
    restarts: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment.

    Attributes:
        workers: Its workers.
        pending: Requests that are not answered yet.
        waiting: Requests among them that no worker has.
        is_degraded: Whether a worker was given up.
        shared_bytes: Shared memory it holds.
        used_bytes: The part of it that is in use.
    """

    workers: tuple[WorkerStats, ...]
    pending: int
    waiting: int
    is_degraded: bool
    shared_bytes: int
    used_bytes: int


@dataclass(eq=False)
class WorkerState:
    """A worker across restarts of its process.

    Attributes:
        template: The worker that is forked to start it; None to start a process of its own.
        is_stop_sent: Whether its process was asked to end.
        killed_at: When its process was killed; infinite for not at all.
        fails_oldest: Whether, if it ends, the request that it was at fails.
        start_error: What it said when it could not start.
        short_since: Since when the system has had no room for its process; None while it has.
        served_now: Requests it answered with the process that it has.
    """

    variables: Mapping[str, str]
    job: WorkerJob
    figures: WorkerStats
    template: WorkerState | None = None
    process: WorkerProcess | None = None
    is_stop_sent: bool = False
    killed_at: float = math.inf
    fails_oldest: bool = True
    reason: PipelineError | None = None
    start_error: PipelineError | None = None
    error: PipelineError | None = None
    started_at: float = 0.0
    ready_at: float | None = None
    start_again_at: float = 0.0
    short_since: float | None = None
    served: int = 0
    served_now: int = 0
    starts: int = 0
    deaths_in_a_row: int = 0
    output: OutputTail = field(default_factory=lambda: OutputTail())
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))

    @property
    def number(self) -> int:
        """Its number, from 0."""
        return self.figures.number

    @property
    def name(self) -> str:
        """Its device and which of the workers there it is."""
        return self.figures.name

    @property
    def models(self) -> tuple[str, ...]:
        """What it serves."""
        return self.figures.models

    @property
    def is_killed(self) -> bool:
        """Whether its process was killed, and so is about to end."""
        return self.killed_at < math.inf

    @property
    def state(self) -> WorkerStatus:
        """What it is doing."""
        return self.figures.state

    def change(self, state: WorkerStatus, **figures: Any) -> None:
        """Notes a new state, and figures that come with it."""
        self.figures = replace(self.figures, state=state, **figures)

    def begin(self, now: float, process: WorkerProcess) -> None:
        """Notes that it has a process, whose start began at `now`."""
        self.process, self.started_at, self.ready_at = process, now, None
        self.output, self.served_now = OutputTail(), 0
        self.is_stop_sent, self.killed_at, self.fails_oldest = False, math.inf, True
        self.reason = self.start_error = self.short_since = None
        self.change("starting", pid=process.pid, restarts=self.starts)
        self.starts += 1

    def become_ready(self, now: float, **figures: Any) -> None:
        """Notes that it takes requests, and what it said of itself."""
        self.ready_at, self.error = now, None
        self.change("ready", start_s=now - self.started_at, **figures)

    def die(self, now: float, error: PipelineError, *, max_restarts: int) -> None:
        """Notes that its process has ended, and decides whether and when there will be another.

        It is given up after more than `max_restarts` deaths in a row; an answer, or 30 s of uptime, resets
        the count.
        """
        was_steady = self.ready_at is not None and now - self.ready_at >= _STEADY_S
        self.deaths_in_a_row = 1 if was_steady or self.served_now else self.deaths_in_a_row + 1
        self.ready_at, self.error = None, error
        cannot_start = self.start_error is not None and self.figures.start_s is None
        is_given_up = cannot_start or self.deaths_in_a_row > max_restarts
        # Forked at once, the first time: there is nothing to wait for, and little to lose.
        is_quick = self.template is not None and self.deaths_in_a_row == 1
        self.start_again_at = now if is_quick else now + pause_before(self.deaths_in_a_row)
        self.change("failed" if is_given_up else "waiting", pid=None)

    def lack_room(self, now: float, error: PipelineError, *, timeout_s: float) -> None:
        """Notes that the system has no room for its process, which is tried again for some time."""
        self.short_since = now if self.short_since is None else self.short_since
        self.error, short_s = error, now - self.short_since
        self.start_again_at = now + min(max(short_s, _FIRST_PAUSE_S), _MAX_PAUSE_S)
        self.change("failed" if short_s >= timeout_s else "waiting", pid=None)

    def describe_end(
        self, pid: int, exit_code: int | None, unknown: str = "exit code unknown"
    ) -> PipelineError:
        """Returns why its process ended, as requests and observers get it; `unknown` stands for no code."""
        if self.start_error is not None:
            return self.start_error
        lines = self.output.lines
        end = unknown if exit_code is None else describe_exit(exit_code)
        output = "".join(f"\n    {line}" for line in lines)
        reason = "" if self.reason is None else f": {self.reason.message}"
        error = WorkerDiedError(
            f"{self.name} died{reason}\n  pid {pid}, {end}{output}",
            hint=None if self.reason is None else self.reason.hint,
        )
        error.pid, error.returncode, error.stderr = pid, exit_code, lines
        return error

    def note_answers(self, count: int, waited_s: Sequence[float] = ()) -> None:
        """Notes that it answered requests, and how long those took that it did not refuse, in seconds.

        If it was killed for a request and answered it after all, those behind that have no part in it.
        """
        self.served += count
        self.served_now += count
        self.fails_oldest = self.fails_oldest and not self.is_killed
        self.latencies_s.extend(waited_s)

    def stats(self, in_flight: int) -> WorkerStats:
        """Returns what it is now."""
        error = None if self.error is None else str(self.error)
        now = replace(self.figures, served=self.served, in_flight=in_flight, error=error)
        if not self.latencies_s:
            return now
        p50_s, p99_s = np.percentile(self.latencies_s, (50, 99))
        return replace(now, p50_ms=float(p50_s) * 1e3, p99_ms=float(p99_s) * 1e3)


class OutputTail:
    """The last lines of what a worker wrote to its standard output and error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._rest = ""

    def add(self, data: bytes) -> list[str]:
        """Takes what came and returns the lines that it completed."""
        *lines, rest = (self._rest + data.decode(errors="replace")).split("\n")
        self._rest = rest[-_LINE_CHARACTERS:]
        completed = [printable(line[:_LINE_CHARACTERS]) for line in lines if line.strip()]
        self._lines.extend(completed)
        return completed

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines, the oldest first."""
        return (*self._lines, printable(self._rest)) if self._rest.strip() else tuple(self._lines)


def pause_before(deaths_in_a_row: int) -> float:
    """Returns the seconds to wait before a worker is started again: 0.05, then twice as long each time."""
    return min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (deaths_in_a_row - 1))
