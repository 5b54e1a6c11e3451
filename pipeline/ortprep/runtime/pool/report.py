"""What workers say of themselves, and what a pool reports of them."""

from __future__ import annotations

import _socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ortprep.bundle.codec import decode
from ortprep.errors import PipelineError, PoolError, from_dict
from ortprep.runtime.packets import FAILED, REPORT, read_json, receive

WorkerStatus = Literal["starting", "ready", "waiting", "failed", "stopped"]
"""`waiting`: to be started again; `failed`: given up."""


@dataclass(frozen=True)
class WorkerStats:
    """A worker at one moment.

    Attributes:
        number: From 0.
        name: Its device and its number there: `cpu/0`, `cuda:1/0`.
        device: Its device.
        models: The models that it serves.
        variants: Its variant of each model.
        state: What it is doing.
        pid: Its process; None without one.
        start_s: Duration of its last start, process creation included; None before it was ready.
        private_bytes: Its anonymous memory when it was ready; of a fork, what it had written to by then.
        served: Requests it answered.
        in_flight: Requests it has.
        restarts: How often it was started again.
        error: Why it last failed or died.
    """

    number: int
    name: str
    device: str
    models: tuple[str, ...]
    variants: Mapping[str, str] = field(default_factory=dict)
    state: WorkerStatus = "waiting"
    pid: int | None = None
    start_s: float | None = None
    private_bytes: int | None = None
    served: int = 0
    in_flight: int = 0
    restarts: int = 0
    error: str | None = None


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment.

    Attributes:
        workers: Its workers.
        pending: Requests that are not answered yet.
        is_degraded: Whether a worker was given up.
    """

    workers: tuple[WorkerStats, ...]
    pending: int
    is_degraded: bool


@dataclass(frozen=True)
class ReadyReport:
    """What a worker says when it is ready: what it serves, by model, and its anonymous memory.

    `unfit`: why a template cannot be forked; empty if it can be.
    """

    variants: Mapping[str, str]
    private_bytes: int
    unfit: str = ""


def read_report(sock: _socket.socket, name: str) -> ReadyReport | PipelineError:
    """Returns what a worker that starts says: that it is ready, or why it cannot be.

    Raises:
        PipelineError: It says anything else.
        OSError: The connection is lost.
    """
    packet = receive(sock, name)
    if packet is not None and packet.kind == REPORT:
        return decode(ReadyReport, read_json(packet, name))
    if packet is not None and packet.kind == FAILED:
        return from_dict(read_json(packet, name))
    got = "its end" if packet is None else f"a packet of kind {packet.kind}"
    raise PoolError(f"unexpected message from {name}\n  expected its report, got {got}")
