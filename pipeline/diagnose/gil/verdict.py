"""What ticks say of the interpreter's lock. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pipeline.diagnose.diagnosis import Cell, Finding, Table
from pipeline.diagnose.gil.releases import phrase_upgrade
from pipeline.diagnose.gil.ticking import Call

Verdict = Literal["held", "partly", "released", "unclear"]
"""Of the interpreter's lock during a phase; `partly`: for a good part of it."""

LEAST_MS = 10.0
LEAST_GAPS = 3
"""Calls shorter than this, or than so many gaps of a call known to release the lock, say nothing: a busy
machine's scheduler makes gaps of milliseconds."""

HELD_SHARE = 0.5
RELEASED_SHARE = 0.25
"""Longest gap by the call's length: from the one on it is held, up to the other released. Measured on 2 busy
cores: 0.002 to 0.1 where it is released, 0.999 where it is held."""

HELD_PACE = 0.1
"""Ticks by those of a call that is known to release the lock; below, it is held in pieces."""

CREATING = ("load", "initialise", "create")
"""Phases of making a session; `create` is both in one, where a version's own calls cannot be told apart."""


@dataclass(frozen=True)
class Observations:
    """What a process observed.

    Attributes:
        onnxruntime: Version.
        wheel: Installed distribution that it is of; None where that is not clear.
        phases: Calls of ONNX Runtime by phase: `load`, `initialise`, `run`; or `create`, `run`.
        released: Calls that are known to let other threads run while they keep a core busy.
        held: Calls that are known to let none run.
    """

    onnxruntime: str
    wheel: str | None
    phases: Mapping[str, tuple[Call, ...]]
    released: tuple[Call, ...]
    held: tuple[Call, ...]


def clearest(calls: Sequence[Call]) -> Call:
    """Returns the call with the least gap for its length.

    What else a machine does makes gaps, and never ticks: where the lock is held every call shows it, and one
    call that ticks throughout acquits all of them. (Beside a busy process and a hypervisor with other guests,
    medians of three calls that release it had gaps of 40 %.)
    """
    return min(calls, key=lambda call: call.longest_gap_ms / call.elapsed_ms)


def gap_share(calls: Sequence[Call]) -> float:
    """Returns the longest gap of the clearest call by its length: from 0 to 1."""
    call = clearest(calls)
    return call.longest_gap_ms / call.elapsed_ms


def pace(calls: Sequence[Call]) -> float:
    """Returns ticks per millisecond of the clearest call."""
    call = clearest(calls)
    return call.ticks / call.elapsed_ms


def least_ms(released: Sequence[Call]) -> float:
    """Returns how long a call must take to say anything, by what this machine's noise is."""
    return max(LEAST_MS, LEAST_GAPS * median([call.longest_gap_ms for call in released]))


def controls_agree(released: Sequence[Call], held: Sequence[Call]) -> bool:
    """Says whether the two things that are known beforehand come out as they must."""
    return gap_share(released) <= RELEASED_SHARE and gap_share(held) >= HELD_SHARE


def judge(calls: Sequence[Call], *, released: Sequence[Call], held: Sequence[Call]) -> Verdict:
    """Says whether a phase holds the lock.

    Args:
        calls: Of the phase, at least one.
        released: Calls that are known to release it; what they show is what this machine's noise is.
        held: Calls that are known to hold it.
    """
    if clearest(calls).elapsed_ms < least_ms(released) or not controls_agree(released, held):
        return "unclear"
    share = gap_share(calls)
    if share >= HELD_SHARE or pace(calls) < HELD_PACE * pace(released):
        return "held"
    return "released" if share <= RELEASED_SHARE else "partly"


def judge_phases(seen: Observations) -> dict[str, Verdict]:
    """Returns the verdict on every phase."""
    return {
        phase: judge(calls, released=seen.released, held=seen.held) for phase, calls in seen.phases.items()
    }


def find_in(seen: Observations) -> tuple[Finding, ...]:
    """Returns what to say of it."""
    verdicts = judge_phases(seen)
    creating = {phase: verdict for phase, verdict in verdicts.items() if phase in CREATING}
    findings = [*_find_creating(seen, creating)]
    if "run" in verdicts:
        findings += _find_running(seen, verdicts["run"])
    unclear = [phase for phase, verdict in verdicts.items() if verdict == "unclear"]
    return (*findings, *([_explain_unclear(seen, unclear)] if unclear else []))


def explain_nothing(reason: str, hint: str | None) -> Finding:
    """Returns what to say where nothing could be observed."""
    text = f"could not watch ONNX Runtime make a session: {reason}"
    return Finding("gil-not-measured", "problem", text, hint)


def tabulate(seen: Observations) -> Table:
    """Returns the clearest call of every phase as a table."""
    verdicts = judge_phases(seen)
    rows: list[tuple[Cell, ...]] = [
        (phase, *_figures(calls), verdicts[phase]) for phase, calls in seen.phases.items()
    ]
    rows.append(("known to release it", *_figures(seen.released), None))
    rows.append(("known to hold it", *_figures(seen.held), None))
    return Table(
        f"Do other Python threads run meanwhile? (ONNX Runtime {seen.onnxruntime})",
        ("phase", "takes ms", "longest gap ms", "gap share", "ticks", "lock"),
        tuple(rows),
    )


def _figures(calls: Sequence[Call]) -> tuple[float, float, float, int]:
    call = clearest(calls)
    return (
        round(call.elapsed_ms, 1),
        round(call.longest_gap_ms, 1),
        round(gap_share(calls), 3),
        call.ticks,
    )


def _find_creating(seen: Observations, verdicts: Mapping[str, Verdict]) -> tuple[Finding, ...]:
    holding = [phase for phase, verdict in verdicts.items() if verdict in ("held", "partly")]
    released = [phase for phase, verdict in verdicts.items() if verdict == "released"]
    if holding:
        return (
            Finding(
                "gil-held-in-creation",
                "advice",
                f"ONNX Runtime {seen.onnxruntime} keeps the interpreter to itself while it makes a session: "
                f"no other thread ran for {_describe(seen, holding)}; threads that load at once take turns",
                f"{phrase_upgrade(seen.wheel)}, or load in processes: "
                'SessionPool("artifacts/NAME", devices="all")',
            ),
        )
    if released:
        return (
            Finding(
                "gil-released-in-creation",
                "good",
                f"ONNX Runtime {seen.onnxruntime} lets other threads run while it makes a session: "
                f"the longest gap was {_describe(seen, released)}",
            ),
        )
    return ()


def _find_running(seen: Observations, verdict: Verdict) -> tuple[Finding, ...]:
    if verdict == "unclear":
        return ()
    if verdict == "released":
        text = f"other threads run while a session runs: the longest gap was {_describe(seen, ['run'])}"
        return (Finding("gil-released-in-run", "good", text),)
    return (
        Finding(
            "gil-held-in-run",
            "problem" if verdict == "held" else "note",
            f"ONNX Runtime {seen.onnxruntime} keeps the interpreter to itself while a session runs: "
            f"no other thread ran for {_describe(seen, ['run'])}",
            'serve from processes, which do not share an interpreter: SessionPool("artifacts/NAME")',
        ),
    )


def _describe(seen: Observations, phases: Sequence[str]) -> str:
    parts = []
    for phase in phases:
        elapsed_ms, gap_ms, _, _ = _figures(seen.phases[phase])
        parts.append(f"{gap_ms:.1f} of {elapsed_ms:.1f} ms of {phase}")
    return ", ".join(parts)


def _explain_unclear(seen: Observations, phases: Sequence[str]) -> Finding:
    names = ", ".join(phases)
    if not controls_agree(seen.released, seen.held):
        text = (
            f"cannot tell who holds the interpreter in {names}: "
            f"a call known to release it showed a gap of {gap_share(seen.released):.0%} of its length, "
            f"one known to hold it {gap_share(seen.held):.0%}"
        )
        return Finding("gil-unclear", "note", text, "run it again when the machine has less else to do")
    took = ", ".join(f"{_figures(seen.phases[phase])[0]:.1f} ms" for phase in phases)
    text = (
        f"cannot tell who holds the interpreter in {names}: {took} is too short to say, "
        f"on this machine it takes {least_ms(seen.released):.0f} ms"
    )
    return Finding("gil-unclear", "note", text, "ortprep doctor gil  (it makes a model that is large enough)")
