"""Conclusions about the ways to make many sessions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ortprep.diagnose.diagnosis import DiagnosisTable, Finding
from ortprep.diagnose.gil.verdict import phrase_upgrade, releases_in_creation
from ortprep.diagnose.interleaved_runs import explain_cut
from ortprep.measuring.comparison import MIN_ROUNDS, beats, paired_ratio
from ortprep.measuring.rounds import InterleavedRuns

Way = Literal["sequential", "threads", "processes"]
WAYS: tuple[Way, ...] = ("sequential", "threads", "processes")
"""The simplest first: of two that take as long, the simpler one is the better one."""

MIN_GAIN = 0.05
"""Smallest relative difference that is worth a change, noise or not."""

_PHRASES: Mapping[Way, str] = {
    "sequential": "one after another",
    "threads": "in threads of one process",
    "processes": "in a process each",
}

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
        creating_ms: Time from the first session begun to the last ready, of processes that began together.
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
        wheel: Name of the installed distribution of ONNX Runtime; None if that is not clear.
        ways: Times of each way.
    """

    sessions: int
    devices: tuple[str, ...]
    lanes: int
    onnxruntime: str
    wheel: str | None
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
        way for way in ways if not any(beats(figures[other], figures[way], least=MIN_GAIN) for other in ways)
    ]
    # Noise may have them beat each other in a circle; then the smallest median has it.
    return unbeaten[0] if unbeaten else min(ways, key=lambda way: median(figures[way]))


def speed_up(run: ParallelRun, way: Way, figure: str) -> float | None:
    """Returns how many times sooner a way is than one after another; None where either failed."""
    if not {way, "sequential"} <= run.ways.rounds.keys():
        return None
    return paired_ratio(_take(run, "sequential", figure), _take(run, way, figure))


def efficiency(run: ParallelRun, way: Way, figure: str) -> float | None:
    """Returns the speed-up by what it is at best; None where there is none."""
    gained = speed_up(run, way, figure)
    return None if gained is None else gained / min(run.sessions, run.lanes)


def find_in(run: ParallelRun) -> tuple[Finding, ...]:
    """Returns the findings."""
    failed = [_explain_failure(run, way) for way in WAYS if way in run.ways.failures]
    if failed and not run.ways.completed:
        return tuple(failed)
    if run.ways.completed < MIN_ROUNDS:
        return (*failed, explain_cut(run.ways), *_explain_growth(run))
    return (*failed, *_compare_ways(run), *_explain_threads(run), *_explain_growth(run))


def explain_nothing(reason: str, hint: str | None) -> Finding:
    """Returns the finding for a model of which not even one session could be made."""
    return Finding("parallel-not-measured", "problem", f"no session could be made: {reason}", hint)


def tabulate(run: ParallelRun) -> DiagnosisTable:
    """Returns the ways as a table of medians."""
    rows = tuple(
        (
            _PHRASES[way],
            *(_middle(run, way, figure) for figure in ("ready_ms", "start_ms", "creating_ms")),
            *(
                None if (gained := compare(run, way, figure)) is None else round(gained, 2)
                for figure in ("ready_ms", "creating_ms")
                for compare in (speed_up, efficiency)
            ),
            _middle(run, way, "private_mb"),
        )
        for way in WAYS
        if way in run.ways.rounds
    )
    return DiagnosisTable(
        f"{run.sessions} sessions on {', '.join(run.devices)}: medians, start of the processes included",
        (
            *("sessions made", "all ready ms", "start, import ms", "creating ms", "speed-up", "efficiency"),
            *("speed-up of creating", "efficiency of creating", "private MB"),
        ),
        rows,
    )


def _take(run: ParallelRun, way: Way, figure: str) -> list[float]:
    return [float(getattr(made, figure)) for made in run.ways.rounds[way]]


def _middle(run: ParallelRun, way: Way, figure: str) -> float:
    return round(median(_take(run, way, figure)), 1)


def _explain_failure(run: ParallelRun, way: Way) -> Finding:
    text = f"{run.sessions} sessions {_PHRASES[way]} could not be made: {run.ways.failures[way]}"
    if way == "threads" and run.has_shared_device:
        return Finding("way-failed", "note", f"{text}; {_NOT_PROMISED}")
    return Finding("way-failed", "problem", text, f"fewer sessions, or another way than {_PHRASES[way]}")


def _compare_ways(run: ParallelRun) -> Iterator[Finding]:
    """Yields which way is soonest, and which is where the processes run already, if that is another one."""
    soonest, took = _rank_ways(run, "ready_ms")
    text = f"{run.sessions} sessions are ready soonest {_PHRASES[soonest]}, processes' start included: {took}"
    if soonest == "processes":
        yield Finding("processes-soonest", "advice", text, _pool(run))
    elif soonest == "sequential":
        text = f"no way makes {run.sessions} sessions sooner than one after another beyond the noise: {took}"
        yield Finding("sequential-as-soon", "note", text)
    elif run.has_shared_device:
        hint = f"a process each is safe: {_pool(run)}"
        yield Finding("threads-soonest", "note", f"{text}; but {_NOT_PROMISED}", hint)
    else:
        hint = "load in threads, one per device: concurrent.futures.ThreadPoolExecutor"
        yield Finding("threads-soonest", "advice", text, hint)
    creating, took = _rank_ways(run, "creating_ms")
    text = f"where the processes run already, sessions are made soonest {_PHRASES[creating]}: {took}"
    # In one process start and import are the same for both ways: a difference there is noise.
    if creating == "processes" != soonest:
        yield Finding("processes-soonest-once-running", "note", text)
    elif creating == "threads" != soonest:
        yield Finding("threads-soonest-once-running", "note", text)


def _rank_ways(run: ParallelRun, figure: str) -> tuple[Way, str]:
    """Returns the soonest way, and the medians of all."""
    ways = [way for way in WAYS if way in run.ways.rounds]
    medians = ", ".join(f"{_middle(run, way, figure):.0f} ms {_PHRASES[way]}" for way in ways)
    return find_soonest({way: _take(run, way, figure) for way in ways}), medians


def _explain_threads(run: ParallelRun) -> Iterator[Finding]:
    gained, share = speed_up(run, "threads", "creating_ms"), efficiency(run, "threads", "creating_ms")
    if gained is None or share is None or min(run.sessions, run.lanes) < 2:
        return
    taken = (_take(run, way, "creating_ms") for way in ("threads", "sequential"))
    if beats(*taken, least=MIN_GAIN):
        text = f"threads make sessions {gained:.2f}× sooner than one after another: {share:.0%} efficient"
        yield Finding("threads-gain", "good", text)
        return
    text = f"threads make sessions no sooner beyond the noise than one after another: {gained:.2f}×"
    if releases_in_creation(run.onnxruntime):
        text += (
            "; the interpreter is free meanwhile, so it is memory, the allocator or the driver they wait for"
        )
        yield Finding("threads-gain-nothing", "note", text)
    else:
        text += f"; ONNX Runtime {run.onnxruntime} keeps the interpreter to itself while it makes one"
        yield Finding("threads-take-turns", "advice", text, phrase_upgrade(run.wheel))


def _explain_growth(run: ParallelRun) -> Iterator[Finding]:
    sequential = run.ways.rounds.get("sequential")
    if sequential is None:
        return
    firsts = [made.session_ms[0] for made in sequential]
    further = [median(made.session_ms[1:]) for made in sequential if made.session_ms[1:]]
    times = ", ".join(
        f"{paired_ratio(_take(run, way, 'creating_ms'), firsts):.1f}× {_PHRASES[way]}"
        for way in run.ways.rounds
    )
    text = f"a process's first session takes {median(firsts):.0f} ms"
    text += f", a further one {median(further):.0f} ms" if further else ""
    text += f"; making {run.sessions} takes, of that first one, {times}"
    yield Finding("growth", "note", text)


def _pool(run: ParallelRun) -> str:
    if len(set(run.devices)) > 1:
        return 'SessionPool("artifacts/NAME")'
    config = f'PoolConfig(devices=["{run.devices[0]}"], workers_per_device={run.sessions})'
    return f'SessionPool("artifacts/NAME", {config})'
