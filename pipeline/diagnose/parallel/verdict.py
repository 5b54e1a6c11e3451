"""Which way makes many sessions soonest, and by how much. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pipeline.diagnose.diagnosis import Finding, Table
from pipeline.measuring.comparison import LEAST_ROUNDS, is_below, paired_ratio, separated
from pipeline.versions import parse_version

Way = Literal["sequential", "threads", "processes"]
WAYS: tuple[Way, ...] = ("sequential", "threads", "processes")
"""The simplest first: of two that take as long, the simpler one is the better one."""

WORTH = 1.05
"""Less than this many times sooner is not worth a change, noise or not."""

RELEASED_FROM = (1, 31)
"""Version of ONNX Runtime from which threads can make sessions at once (microsoft/onnxruntime #27063)."""

_SAY: Mapping[Way, str] = {
    "sequential": "one after another",
    "threads": "in threads of one process",
    "processes": "in a process each",
}


@dataclass(frozen=True)
class Made:
    """What one way took in one round; milliseconds.

    Attributes:
        ready_ms: From before the first process is started until the last session is there.
        start_ms: Of that, until the last process has imported ONNX Runtime.
        creating_ms: Making the sessions, start and import left out: from the first begun to the last ready in
            one process; in a process each, what the slowest took for its own beside the others.
        session_ms: Making each session, in order.
        private_mb: Anonymous memory of all processes together, with all sessions there.
    """

    ready_ms: float
    start_ms: float
    creating_ms: float
    session_ms: tuple[float, ...]
    private_mb: float


@dataclass(frozen=True)
class Race:
    """What was measured.

    Attributes:
        sessions: How many are made.
        devices: Where, in turn.
        lanes: How many can be made at once at best: devices, or cores of the CPU.
        onnxruntime: Version.
        rounds: Per way that was measured in every round, what it took in each.
        failures: Per way that failed, why.
    """

    sessions: int
    devices: tuple[str, ...]
    lanes: int
    onnxruntime: str
    rounds: Mapping[Way, tuple[Made, ...]]
    failures: Mapping[Way, str]


def find_soonest(figures: Mapping[Way, Sequence[float]]) -> Way:
    """Returns the simplest way that no other one beats beyond the noise and by what is worth it.

    Args:
        figures: Per way, one figure a round, smaller is better; at least one way.
    """
    ways = [way for way in WAYS if way in figures]
    unbeaten = [way for way in ways if not any(beats(figures[other], figures[way]) for other in ways)]
    # Noise may have them beat each other in a circle; then the smallest median has it.
    return unbeaten[0] if unbeaten else min(ways, key=lambda way: median(figures[way]))


def beats(one: Sequence[float], other: Sequence[float], *, worth: float = WORTH) -> bool:
    """Says whether figures are below others beyond the noise and by what is worth it; of too few, no.

    Both tests of noise must agree, since few rounds are compared with each other in several ways.

    Args:
        one: A figure a round.
        other: Likewise, from the same rounds.
        worth: How many times smaller they must be at least.
    """
    if len(one) < LEAST_ROUNDS:
        return False
    return separated(one, other) and is_below(one, other) and paired_ratio(other, one) >= worth


def speed_up(race: Race, way: Way, figure: str) -> float | None:
    """Returns how many times sooner a way is than one after another; None where either failed."""
    if way not in race.rounds or "sequential" not in race.rounds:
        return None
    return paired_ratio(_take(race, "sequential", figure), _take(race, way, figure))


def efficiency(race: Race, way: Way, figure: str) -> float | None:
    """Returns the speed-up by what it is at best; None where there is none."""
    gained = speed_up(race, way, figure)
    return None if gained is None else gained / min(race.sessions, race.lanes)


def find_in(race: Race) -> tuple[Finding, ...]:
    """Returns what to say of it."""
    failed = [_explain_failure(race, way) for way in WAYS if way in race.failures]
    if not race.rounds:
        return tuple(failed)
    soonest = find_soonest({way: _take(race, way, "ready_ms") for way in race.rounds})
    return (
        *failed,
        _explain_soonest(race, soonest),
        *_explain_running(race, soonest),
        *_explain_threads(race),
        *_explain_growth(race),
    )


def explain_nothing(reason: str, hint: str | None) -> Finding:
    """Returns what to say where not even one session could be made."""
    return Finding("parallel-not-measured", "problem", f"no session could be made: {reason}", hint)


def tabulate(race: Race) -> Table:
    """Returns the ways as a table of medians."""
    rows = tuple(
        (
            _SAY[way],
            *(_middle(race, way, figure) for figure in ("ready_ms", "start_ms", "creating_ms")),
            _rounded(speed_up(race, way, "ready_ms")),
            _rounded(efficiency(race, way, "ready_ms")),
            _rounded(speed_up(race, way, "creating_ms")),
            _rounded(efficiency(race, way, "creating_ms")),
            _middle(race, way, "private_mb"),
        )
        for way in WAYS
        if way in race.rounds
    )
    return Table(
        f"{race.sessions} sessions on {', '.join(race.devices)}: medians, start of the processes included",
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


def _take(race: Race, way: Way, figure: str) -> list[float]:
    return [float(getattr(made, figure)) for made in race.rounds[way]]


def _middle(race: Race, way: Way, figure: str) -> float:
    return round(median(_take(race, way, figure)), 1)


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 2)


def _explain_failure(race: Race, way: Way) -> Finding:
    text = f"{race.sessions} sessions {_SAY[way]} could not be made: {race.failures[way]}"
    return Finding("way-failed", "problem", text, f"fewer sessions, or another way than {_SAY[way]}")


def _explain_soonest(race: Race, soonest: Way) -> Finding:
    took = ", ".join(
        f"{_middle(race, way, 'ready_ms'):.0f} ms {_SAY[way]}" for way in WAYS if way in race.rounds
    )
    text = f"{race.sessions} sessions are ready soonest {_SAY[soonest]}, processes' start included: {took}"
    if soonest == "processes":
        return Finding("processes-soonest", "advice", text, _pool(race))
    if soonest == "threads":
        return _explain_threads_soonest(race, text)
    text = f"no way makes {race.sessions} sessions sooner than one after another beyond the noise: {took}"
    return Finding("sequential-as-soon", "note", text)


def _explain_threads_soonest(race: Race, text: str) -> Finding:
    if race.sessions <= len(set(race.devices)):
        hint = "load in threads, one per device: concurrent.futures.ThreadPoolExecutor"
        return Finding("threads-soonest", "advice", text, hint)
    text += (
        "; but ONNX Runtime does not promise that sessions on one device can be made at once "
        "(microsoft/onnxruntime #27089), so this package's load has threads take turns there"
    )
    return Finding("threads-soonest", "note", text, f"a process each is safe: {_pool(race)}")


def _explain_running(race: Race, soonest: Way) -> tuple[Finding, ...]:
    """Says what holds for processes that run already, where that is something else."""
    creating = find_soonest({way: _take(race, way, "creating_ms") for way in race.rounds})
    if creating == soonest:
        return ()
    took = ", ".join(
        f"{_middle(race, way, 'creating_ms'):.0f} ms {_SAY[way]}" for way in WAYS if way in race.rounds
    )
    text = f"where the processes run already, sessions are made soonest {_SAY[creating]}: {took}"
    return (Finding(f"{creating}-soonest-once-running", "note", text),)


def _explain_threads(race: Race) -> tuple[Finding, ...]:
    gained, share = speed_up(race, "threads", "creating_ms"), efficiency(race, "threads", "creating_ms")
    if gained is None or share is None or min(race.sessions, race.lanes) < 2:
        return ()
    if beats(_take(race, "threads", "creating_ms"), _take(race, "sequential", "creating_ms")):
        text = f"threads make sessions {gained:.2f}× sooner than one after another: {share:.0%} efficient"
        return (Finding("threads-gain", "good", text),)
    text = f"threads make sessions no sooner beyond the noise than one after another: {gained:.2f}×"
    if (parse_version(race.onnxruntime) or RELEASED_FROM) < RELEASED_FROM:
        text += f"; ONNX Runtime {race.onnxruntime} keeps the interpreter to itself while it makes one"
        return (Finding("threads-take-turns", "advice", text, "pip install 'onnxruntime-gpu>=1.31'"),)
    text += "; the interpreter is free meanwhile, so it is memory, the allocator or the driver they wait for"
    return (Finding("threads-gain-nothing", "note", text),)


def _explain_growth(race: Race) -> tuple[Finding, ...]:
    if "sequential" not in race.rounds:
        return ()
    firsts = [made.session_ms[0] for made in race.rounds["sequential"]]
    further = [median(made.session_ms[1:]) for made in race.rounds["sequential"] if made.session_ms[1:]]
    times = ", ".join(
        f"{paired_ratio(_take(race, way, 'creating_ms'), firsts):.1f}× {_SAY[way]}" for way in race.rounds
    )
    text = f"a process's first session takes {median(firsts):.0f} ms"
    text += f", a further one {median(further):.0f} ms" if further else ""
    text += f"; making {race.sessions} takes, of that first one, {times}"
    return (Finding("growth", "note", text),)


def _pool(race: Race) -> str:
    if len(set(race.devices)) > 1:
        return 'SessionPool("artifacts/NAME", devices="all")'
    device = race.devices[0]
    return f'SessionPool("artifacts/NAME", devices=["{device}"], workers_per_device={race.sessions})'
