"""Which way makes many sessions soonest, and by how much. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pipeline.diagnose.diagnosis import Finding, Table
from pipeline.diagnose.gil.releases import phrase_upgrade, releases_in_creation
from pipeline.diagnose.turns import explain_cut
from pipeline.measuring.comparison import LEAST_ROUNDS, beats, paired_ratio

Way = Literal["sequential", "threads", "processes"]
WAYS: tuple[Way, ...] = ("sequential", "threads", "processes")
"""The simplest first: of two that take as long, the simpler one is the better one."""

LEAST = 0.05
"""What takes longer by less than this share is not worth a change, noise or not."""

_SAY: Mapping[Way, str] = {
    "sequential": "one after another",
    "threads": "in threads of one process",
    "processes": "in a process each",
}

_ONCE_RUNNING: Mapping[Way, str] = {
    "threads": "threads-soonest-once-running",
    "processes": "processes-soonest-once-running",
}

_NOT_PROMISED = (
    "ONNX Runtime does not promise that sessions on one device can be made at once "
    "(microsoft/onnxruntime #27089), so this package's load has threads take turns there"
)


@dataclass(frozen=True)
class Made:
    """What one way took in one round; milliseconds.

    Attributes:
        ready_ms: From before the first process is started until the last session is there.
        start_ms: Of that, until the last process has imported ONNX Runtime.
        creating_ms: Making the sessions, from the first begun to the last ready, start and import left out;
            in a process each, of processes that waited for each other before.
        session_ms: Making each of those, in order.
        private_mb: Anonymous memory of all processes together, with all sessions there.
    """

    ready_ms: float
    start_ms: float
    creating_ms: float
    session_ms: tuple[float, ...]
    private_mb: float


@dataclass(frozen=True)
class ParallelRun:
    """What was measured.

    Attributes:
        sessions: How many are made.
        devices: Where, in turn.
        lanes: How many can be made at once at best: devices, or cores of the CPU.
        onnxruntime: Version.
        wheel: Installed distribution that it is of; None where that is not clear.
        rounds: Per way that was measured in every round, what it took in each.
        failures: Per way that failed, why.
        round_s: What a round took, or by estimate takes where none was begun.
    """

    sessions: int
    devices: tuple[str, ...]
    lanes: int
    onnxruntime: str
    wheel: str | None
    rounds: Mapping[Way, tuple[Made, ...]]
    failures: Mapping[Way, str]
    round_s: float

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
    unbeaten = [way for way in ways if not any(_beats(figures[other], figures[way]) for other in ways)]
    # Noise may have them beat each other in a circle; then the smallest median has it.
    return unbeaten[0] if unbeaten else min(ways, key=lambda way: median(figures[way]))


def _beats(below: Sequence[float], above: Sequence[float]) -> bool:
    return beats(below, above, least=LEAST)


def speed_up(run: ParallelRun, way: Way, figure: str) -> float | None:
    """Returns how many times sooner a way is than one after another; None where either failed."""
    if way not in run.rounds or "sequential" not in run.rounds:
        return None
    return paired_ratio(_take(run, "sequential", figure), _take(run, way, figure))


def efficiency(run: ParallelRun, way: Way, figure: str) -> float | None:
    """Returns the speed-up by what it is at best; None where there is none."""
    gained = speed_up(run, way, figure)
    return None if gained is None else gained / min(run.sessions, run.lanes)


def find_in(run: ParallelRun) -> tuple[Finding, ...]:
    """Returns what to say of it."""
    failed = [_explain_failure(run, way) for way in WAYS if way in run.failures]
    done = min((len(rounds) for rounds in run.rounds.values()), default=0)
    if failed and not done:
        return tuple(failed)
    if done < LEAST_ROUNDS:
        return (*failed, explain_cut(done, run.round_s), *_explain_growth(run))
    soonest = find_soonest({way: _take(run, way, "ready_ms") for way in run.rounds})
    return (
        *failed,
        _explain_soonest(run, soonest),
        *_explain_running(run, soonest),
        *_explain_threads(run),
        *_explain_growth(run),
    )


def explain_nothing(reason: str, hint: str | None) -> Finding:
    """Returns what to say where not even one session could be made."""
    return Finding("parallel-not-measured", "problem", f"no session could be made: {reason}", hint)


def tabulate(run: ParallelRun) -> Table:
    """Returns the ways as a table of medians."""
    rows = tuple(
        (
            _SAY[way],
            *(_middle(run, way, figure) for figure in ("ready_ms", "start_ms", "creating_ms")),
            _rounded(speed_up(run, way, "ready_ms")),
            _rounded(efficiency(run, way, "ready_ms")),
            _rounded(speed_up(run, way, "creating_ms")),
            _rounded(efficiency(run, way, "creating_ms")),
            _middle(run, way, "private_mb"),
        )
        for way in WAYS
        if way in run.rounds
    )
    return Table(
        f"{run.sessions} sessions on {', '.join(run.devices)}: medians, start of the processes included",
        (
            "sessions made",
            "all ready ms",
            "start, import ms",
            "creating ms",
            "speed-up",
            "efficiency",
            "speed-up of creating",
            "efficiency of creating",
            "private MB",
        ),
        rows,
    )


def _take(run: ParallelRun, way: Way, figure: str) -> list[float]:
    return [float(getattr(made, figure)) for made in run.rounds[way]]


def _middle(run: ParallelRun, way: Way, figure: str) -> float:
    return round(median(_take(run, way, figure)), 1)


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 2)


def _explain_failure(run: ParallelRun, way: Way) -> Finding:
    text = f"{run.sessions} sessions {_SAY[way]} could not be made: {run.failures[way]}"
    if way == "threads" and run.has_shared_device:
        return Finding("way-failed", "note", f"{text}; {_NOT_PROMISED}")
    return Finding("way-failed", "problem", text, f"fewer sessions, or another way than {_SAY[way]}")


def _explain_soonest(run: ParallelRun, soonest: Way) -> Finding:
    took = ", ".join(
        f"{_middle(run, way, 'ready_ms'):.0f} ms {_SAY[way]}" for way in WAYS if way in run.rounds
    )
    text = f"{run.sessions} sessions are ready soonest {_SAY[soonest]}, processes' start included: {took}"
    if soonest == "processes":
        return Finding("processes-soonest", "advice", text, _pool(run))
    if soonest == "threads":
        return _explain_threads_soonest(run, text)
    text = f"no way makes {run.sessions} sessions sooner than one after another beyond the noise: {took}"
    return Finding("sequential-as-soon", "note", text)


def _explain_threads_soonest(run: ParallelRun, text: str) -> Finding:
    if not run.has_shared_device:
        hint = "load in threads, one per device: concurrent.futures.ThreadPoolExecutor"
        return Finding("threads-soonest", "advice", text, hint)
    text += f"; but {_NOT_PROMISED}"
    return Finding("threads-soonest", "note", text, f"a process each is safe: {_pool(run)}")


def _explain_running(run: ParallelRun, soonest: Way) -> tuple[Finding, ...]:
    """Says what holds for processes that run already, where that is something else."""
    creating = find_soonest({way: _take(run, way, "creating_ms") for way in run.rounds})
    # In one process start and import are the same for both ways: what is apart there is noise.
    if creating in (soonest, "sequential"):
        return ()
    took = ", ".join(
        f"{_middle(run, way, 'creating_ms'):.0f} ms {_SAY[way]}" for way in WAYS if way in run.rounds
    )
    text = f"where the processes run already, sessions are made soonest {_SAY[creating]}: {took}"
    return (Finding(_ONCE_RUNNING[creating], "note", text),)


def _explain_threads(run: ParallelRun) -> tuple[Finding, ...]:
    gained, share = speed_up(run, "threads", "creating_ms"), efficiency(run, "threads", "creating_ms")
    if gained is None or share is None or min(run.sessions, run.lanes) < 2:
        return ()
    if _beats(_take(run, "threads", "creating_ms"), _take(run, "sequential", "creating_ms")):
        text = f"threads make sessions {gained:.2f}× sooner than one after another: {share:.0%} efficient"
        return (Finding("threads-gain", "good", text),)
    text = f"threads make sessions no sooner beyond the noise than one after another: {gained:.2f}×"
    if not releases_in_creation(run.onnxruntime):
        text += f"; ONNX Runtime {run.onnxruntime} keeps the interpreter to itself while it makes one"
        return (Finding("threads-take-turns", "advice", text, phrase_upgrade(run.wheel)),)
    text += "; the interpreter is free meanwhile, so it is memory, the allocator or the driver they wait for"
    return (Finding("threads-gain-nothing", "note", text),)


def _explain_growth(run: ParallelRun) -> tuple[Finding, ...]:
    if "sequential" not in run.rounds:
        return ()
    firsts = [made.session_ms[0] for made in run.rounds["sequential"]]
    further = [median(made.session_ms[1:]) for made in run.rounds["sequential"] if made.session_ms[1:]]
    times = ", ".join(
        f"{paired_ratio(_take(run, way, 'creating_ms'), firsts):.1f}× {_SAY[way]}" for way in run.rounds
    )
    text = f"a process's first session takes {median(firsts):.0f} ms"
    text += f", a further one {median(further):.0f} ms" if further else ""
    text += f"; making {run.sessions} takes, of that first one, {times}"
    return (Finding("growth", "note", text),)


def _pool(run: ParallelRun) -> str:
    if len(set(run.devices)) > 1:
        return 'SessionPool("artifacts/NAME", devices="all")'
    device = run.devices[0]
    return f'SessionPool("artifacts/NAME", devices=["{device}"], workers_per_device={run.sessions})'
