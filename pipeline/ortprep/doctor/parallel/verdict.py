"""Conclusions about the ways to make many sessions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.gil.verdict import UPGRADE, releases_in_creation
from ortprep.doctor.interleaved_runs import PHRASES, explain_failures, phrase_medians, read_rounds
from ortprep.measuring.comparison import MIN_ROUNDS, is_below, paired_ratio
from ortprep.measuring.rounds import InterleavedRuns
from ortprep.tables import Table

Way = Literal["sequential", "threads", "processes"]
WAYS: tuple[Way, ...] = ("sequential", "threads", "processes")
"""The simplest first: of two that take as long, the simpler one is the better one."""

MIN_GAIN = 0.05
"""Smallest relative difference that is worth a change, noise or not."""

_NOT_PROMISED = (
    "ONNX Runtime does not promise that sessions on one device can be made at once "
    "(microsoft/onnxruntime #27089), so this package's load has threads take turns there"
)


@dataclass(frozen=True)
class CreationResult:
    """Times of one way in one round.

    Attributes:
        ready_ms: Time from before the first process starts until the last session is ready.
        start_ms: Part of it until the last process has imported ONNX Runtime.
        creating_ms: Time from the first session begun to the last ready.
        session_ms: Time of each session, in order.
        private_mb: Anonymous memory of all processes together.
    """

    ready_ms: float
    start_ms: float
    creating_ms: float
    session_ms: tuple[float, ...]
    private_mb: float


@dataclass(frozen=True)
class ParallelRun:
    """Measurements of all ways.

    Attributes:
        sessions: Number of sessions.
        devices: Devices that the sessions are put on in turn.
        lanes: Most sessions that can be made at once: devices, or cores of the CPU.
        onnxruntime: Version.
        ways: Times of each way.
    """

    sessions: int
    devices: tuple[str, ...]
    lanes: int
    onnxruntime: str
    ways: InterleavedRuns[Way, CreationResult]

    @property
    def has_shared_device(self) -> bool:
        """Whether several sessions are on one device."""
        return self.sessions > len(set(self.devices))


def find_soonest(figures: Mapping[Way, Sequence[float]]) -> Way:
    """Returns the simplest way that no other one beats beyond the noise and by what is worth it.

    Args:
        figures: Per way, one figure a round, smaller is better; at least one way.
    """
    ways = [way for way in WAYS if way in figures]
    unbeaten = [
        way
        for way in ways
        if not any(is_below(figures[other], figures[way], min_gain=MIN_GAIN) for other in ways)
    ]
    # Noise may have them beat each other in a circle; then the smallest median has it.
    return unbeaten[0] if unbeaten else min(ways, key=lambda way: median(figures[way]))


def speed_up(run: ParallelRun, way: Way) -> float | None:
    """Returns how many times sooner a way is ready than one after another; None where either failed."""
    ready = read_rounds(run.ways, lambda result: result.ready_ms)
    return paired_ratio(ready["sequential"], ready[way]) if {way, "sequential"} <= ready.keys() else None


def efficiency(run: ParallelRun, way: Way) -> float | None:
    """Returns the speed-up by what it is at best; None where there is none."""
    gain = speed_up(run, way)
    return None if gain is None else gain / min(run.sessions, run.lanes)


def find_in(run: ParallelRun) -> tuple[Finding, ...]:
    """Returns the findings."""
    tolerated = {"threads": _NOT_PROMISED} if run.has_shared_device else {}
    failures = explain_failures(run.ways, f"{run.sessions} sessions", tolerated=tolerated)
    if run.ways.completed < MIN_ROUNDS:
        return tuple(failures)
    return (*failures, _compare_ways(run), *_explain_threads(run))


def tabulate(run: ParallelRun) -> Table:
    """Returns the ways as a table of medians."""
    columns = ("sessions made", "all ready ms", "start, import ms", "creating ms", "private MB")
    names = ("ready_ms", "start_ms", "creating_ms", "private_mb")
    rows = []
    for way in (way for way in WAYS if way in run.ways.rounds):
        medians = [median(getattr(result, name) for result in run.ways.rounds[way]) for name in names]
        rows.append(
            (PHRASES[way], *(round(one, 1) for one in medians), speed_up(run, way), efficiency(run, way))
        )
    title = f"{run.sessions} sessions on {', '.join(run.devices)}: medians, start of the processes included"
    return Table(title, (*columns, "speed-up", "efficiency"), tuple(rows))


def _compare_ways(run: ParallelRun) -> Finding:
    ready = read_rounds(run.ways, lambda result: result.ready_ms)
    soonest = find_soonest(ready)
    text = (
        f"{run.sessions} sessions are ready soonest {PHRASES[soonest]}, processes' start included: "
        f"{phrase_medians(ready)}"
    )
    if soonest == "processes":
        return Finding("processes-soonest", "advice", text, _pool(run))
    if soonest == "sequential":
        return Finding("sequential-as-soon", "note", f"{text}; no other way gains beyond the noise")
    if run.has_shared_device:
        return Finding(
            "threads-soonest", "note", f"{text}; but {_NOT_PROMISED}", f"a process each is safe: {_pool(run)}"
        )
    hint = "load in threads, one per device: concurrent.futures.ThreadPoolExecutor"
    return Finding("threads-soonest", "advice", text, hint)


def _explain_threads(run: ParallelRun) -> Iterator[Finding]:
    creating = read_rounds(run.ways, lambda result: result.creating_ms)
    if not {"threads", "sequential"} <= creating.keys() or min(run.sessions, run.lanes) < 2:
        return
    gain = paired_ratio(creating["sequential"], creating["threads"])
    if is_below(creating["threads"], creating["sequential"], min_gain=MIN_GAIN):
        share = gain / min(run.sessions, run.lanes)
        text = f"threads make sessions {gain:.2f}× sooner than one after another: {share:.0%} efficient"
        yield Finding("threads-gain", "ok", text)
        return
    text = f"threads make sessions no sooner than one after another, beyond the noise: {gain:.2f}×"
    if releases_in_creation(run.onnxruntime):
        text += "; the interpreter is free meanwhile, so they wait for memory, the allocator or the driver"
        yield Finding("threads-gain-nothing", "note", text)
    else:
        text += f"; ONNX Runtime {run.onnxruntime} keeps the interpreter to itself while it makes one"
        yield Finding("threads-take-turns", "advice", text, UPGRADE)


def _pool(run: ParallelRun) -> str:
    if len(set(run.devices)) > 1:
        return 'SessionPool("artifacts/NAME")'
    config = f'PoolConfig(devices=["{run.devices[0]}"], workers_per_device={run.sessions})'
    return f'SessionPool("artifacts/NAME", {config})'
