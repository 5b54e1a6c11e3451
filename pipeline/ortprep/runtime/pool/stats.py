"""What a pool reports of its workers: events as they happen, and statistics of one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ortprep.errors import PipelineError

WorkerStatus = Literal["starting", "ready", "waiting", "failed", "stopped"]
"""`waiting`: to be started again; `failed`: given up."""


@dataclass(frozen=True)
class WorkerEvent:
    """Something that happened to a worker, to be shown.

    Attributes:
        worker: Its number.
        name: Its name.
        state: Its new state.
        phase: The phase of its start that just ended (`import`, or a model's name), else "".
        seconds: Duration of that phase.
        error: Why it failed or died, None if it did not.
    """

    worker: int
    name: str
    state: WorkerStatus
    phase: str = ""
    seconds: float = 0.0
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
        phases_s: Durations of the phases of that: `import`, then every model by name.
        private_bytes: Its anonymous memory when it was ready.
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
    phases_s: Mapping[str, float] = field(default_factory=dict)
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
        copied_in_bytes: Bytes of inputs that it has copied so far.
        copied_out_bytes: Bytes of outputs that were copied, in workers and here.
    """

    workers: tuple[WorkerStats, ...]
    pending: int
    waiting: int
    is_degraded: bool
    shared_bytes: int
    used_bytes: int
    copied_in_bytes: int
    copied_out_bytes: int
