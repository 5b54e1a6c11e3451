"""A pool's workers as its supervisor knows them, and what they are said to be: values, no processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import PipelineError
from pipeline.runtime.pool.workplaces import Workplace

WorkerState = Literal["starting", "ready", "waiting", "failed", "stopped"]
"""`waiting`: to be started again; `failed`: given up."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 10.0
_STEADY_S = 30.0
_LATENCIES = 2048
_LINES, _LINE_CHARACTERS = 20, 2000


@dataclass(frozen=True)
class WorkerEvent:
    """Something that happened to a worker, for whoever wants to show it.

    Attributes:
        worker: Its number.
        name: Its name.
        state: What it is now.
        phase: What it has just finished of its start, "" for none: `import`, or a model's name.
        seconds: What that took.
        error: Why it failed or died, None if it did not.
    """

    worker: int
    name: str
    state: WorkerState
    phase: str = ""
    seconds: float = 0.0
    error: PipelineError | None = None


@dataclass(frozen=True)
class WorkerStats:
    """A worker at one moment.

    Attributes:
        number: From 0.
        name: `cpu/0`, `cuda:1/0`: its device, and which of the workers there it is.
        device: Its device.
        models: What it serves.
        variants: Which variant of each model it took.
        buckets: Those for batches of certain sizes that it has beside it, likewise.
        state: What it is doing.
        pid: Its process; None without one.
        start_s: What its last start took, from before its process was made; None before it was ready.
        phases_s: What the parts of that took: `import`, then every model by name.
        private_bytes: Its anonymous memory when it was ready.
        served: Requests it answered.
        in_flight: Requests it has.
        restarts: How often it was started again.
        p50_ms: Median time of its last requests, from call to answer; None without any.
        p99_ms: 99th percentile likewise.
        error: Why it last failed or died.
    """

    number: int
    name: str
    device: str
    models: tuple[str, ...]
    variants: Mapping[str, str]
    buckets: Mapping[str, tuple[str, ...]]
    state: WorkerState
    pid: int | None
    start_s: float | None
    phases_s: Mapping[str, float]
    private_bytes: int | None
    served: int
    in_flight: int
    restarts: int
    p50_ms: float | None
    p99_ms: float | None
    error: str | None


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment.

    Attributes:
        workers: Its workers.
        pending: Requests that are not answered yet.
        waiting: Those of them that no worker has.
        is_degraded: Whether a worker was given up.
        shared_bytes: Shared memory it holds.
        used_bytes: What of that is somebody's.
        copied_in_bytes: Bytes of inputs it copied since it was made.
        copied_out_bytes: Bytes of outputs likewise, in workers and here.
    """

    workers: tuple[WorkerStats, ...]
    pending: int
    waiting: int
    is_degraded: bool
    shared_bytes: int
    used_bytes: int
    copied_in_bytes: int
    copied_out_bytes: int


@dataclass
class Member:
    """A worker over all its lives.

    Attributes:
        number: From 0.
        name: Its device and which of the workers there it is.
        workplace: Where it runs.
        models: What it serves.
        most_restarts: How many deaths in a row, without an answer or half a minute of peace between them, it
            is started again after.
    """

    number: int
    name: str
    workplace: Workplace
    models: tuple[str, ...]
    most_restarts: int
    state: WorkerState = "waiting"
    pid: int | None = None
    started_at: float = 0.0
    ready_at: float | None = None
    start_again_at: float = 0.0
    start_s: float | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
    buckets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    private_bytes: int | None = None
    served: int = 0
    refusals: int = 0
    served_before: int = 0
    starts: int = 0
    deaths_in_a_row: int = 0
    was_ready: bool = False
    error: PipelineError | None = None
    said: Said = field(default_factory=lambda: Said())
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))

    def begin(self, now: float) -> None:
        """Notes that it is being started."""
        self.state, self.started_at, self.ready_at = "starting", now, None
        self.phases_s, self.said = {}, Said()
        self.served_before = self.served
        self.starts += 1

    def become_ready(self, now: float) -> None:
        """Notes that it takes requests."""
        self.state, self.ready_at, self.was_ready, self.error = "ready", now, True, None
        self.start_s = now - self.started_at

    def die(self, now: float, error: PipelineError, *, is_hopeless: bool) -> None:
        """Notes that its process has ended, and decides whether and when there will be another.

        Args:
            now: The time.
            error: Why.
            is_hopeless: Whether another would end the same way.
        """
        was_steady = self.ready_at is not None and now - self.ready_at >= _STEADY_S
        self.deaths_in_a_row = (
            1 if was_steady or self.served > self.served_before else self.deaths_in_a_row + 1
        )
        self.pid, self.ready_at, self.error = None, None, error
        if is_hopeless or self.deaths_in_a_row > self.most_restarts:
            self.state = "failed"
            return
        self.state = "waiting"
        self.start_again_at = now + pause_before(self.deaths_in_a_row)

    def stats(self, in_flight: int) -> WorkerStats:
        """Returns what it is now."""
        p50_ms, p99_ms = percentiles_ms(self.latencies_s)
        return WorkerStats(
            number=self.number,
            name=self.name,
            device=self.workplace.device.name,
            models=self.models,
            variants=dict(self.variants),
            buckets=dict(self.buckets),
            state=self.state,
            pid=self.pid,
            start_s=self.start_s,
            phases_s=dict(self.phases_s),
            private_bytes=self.private_bytes,
            served=self.served,
            in_flight=in_flight,
            restarts=max(0, self.starts - 1),
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            error=None if self.error is None else str(self.error),
        )


class Said:
    """The last lines of what a worker wrote to its standard output and error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._rest = ""

    def add(self, data: bytes) -> list[str]:
        """Takes what came and returns the lines that it completed."""
        *lines, rest = (self._rest + data.decode(errors="replace")).split("\n")
        self._rest = rest[-_LINE_CHARACTERS:]
        kept = [line[:_LINE_CHARACTERS] for line in lines if line.strip()]
        self._lines.extend(kept)
        return kept

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines, the oldest first."""
        return (*self._lines, self._rest) if self._rest.strip() else tuple(self._lines)


def pause_before(deaths_in_a_row: int) -> float:
    """Returns the seconds to wait before a worker is started again: 0.05, then twice as long each time."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (deaths_in_a_row - 1))


def percentiles_ms(seconds: deque[float]) -> tuple[float | None, float | None]:
    """Returns the median and the 99th percentile, in milliseconds; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return None, None
    last = len(ordered) - 1
    return ordered[round(last * 0.5)] * 1e3, ordered[round(last * 0.99)] * 1e3
