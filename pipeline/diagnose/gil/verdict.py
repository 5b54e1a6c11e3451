"""Conclusions from ticks about the interpreter's lock. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Literal

from ortprep.diagnose.diagnosis import DiagnosisTable, Finding, TableCell
from ortprep.diagnose.gil.heartbeat import Call, GilObservations
from ortprep.versions import parse_version

RELEASED_FROM = (1, 31)
"""First ONNX Runtime that lets other threads run while it makes a session (microsoft/onnxruntime #27063)."""

Verdict = Literal["held", "partly", "released", "unclear"]
"""State of the interpreter's lock during a phase; `partly`: for a good part of it."""

MIN_CALL_MS = 10.0
MIN_GAPS = 3
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


def releases_in_creation(version: str) -> bool:
    """Says whether a version does so; one that cannot be read counts as new."""
    return (parse_version(version) or RELEASED_FROM) >= RELEASED_FROM


def phrase_upgrade(wheel: str | None) -> str:
    """Returns the command that installs such a version over the installed distribution, None if unclear.

    Another distribution would own the same files and break both.
    """
    if wheel is None:
        return "ortprep doctor env  (which distribution of ONNX Runtime is installed is not clear)"
    return f"pip install '{wheel}>={'.'.join(map(str, RELEASED_FROM))}'"


def clearest(calls: Sequence[Call]) -> Call:
    """Returns the call with the least gap for its length.

    Other work on the machine makes gaps, and never ticks: if the lock is held every call shows it, and one
    call that ticks throughout acquits all of them. (Beside a busy process and a hypervisor with other guests,
    medians of three calls that release it had gaps of 40 %.)
    """
    return min(calls, key=lambda call: call.gap_share)


def min_call_ms(released: Sequence[Call]) -> float:
    """Returns how long a call must take to say anything, by this machine's noise."""
    return max(MIN_CALL_MS, MIN_GAPS * median([call.longest_gap_ms for call in released]))


def controls_agree(released: Sequence[Call], held: Sequence[Call]) -> bool:
    """Says whether the calls whose effect is known show it."""
    return clearest(released).gap_share <= RELEASED_SHARE and clearest(held).gap_share >= HELD_SHARE


def judge(calls: Sequence[Call], *, released: Sequence[Call], held: Sequence[Call]) -> Verdict:
    """Says whether a phase's calls, at least one, hold the lock; by calls known to release or hold it."""
    call, control = clearest(calls), clearest(released)
    if call.elapsed_ms < min_call_ms(released) or not controls_agree(released, held):
        return "unclear"
    if call.gap_share >= HELD_SHARE or call.tick_rate < HELD_PACE * control.tick_rate:
        return "held"
    return "released" if call.gap_share <= RELEASED_SHARE else "partly"


def judge_phases(seen: GilObservations) -> dict[str, Verdict]:
    """Returns the verdict on every phase."""
    return {
        phase: judge(calls, released=seen.released, held=seen.held) for phase, calls in seen.phases.items()
    }


def find_in(seen: GilObservations) -> tuple[Finding, ...]:
    """Returns the findings."""
    verdicts = judge_phases(seen)
    unclear = [phase for phase, verdict in verdicts.items() if verdict == "unclear"]
    creation = {phase: verdicts[phase] for phase in CREATING if phase in verdicts}
    return (
        *_judge_creation(seen, creation),
        *_judge_runs(seen, verdicts.get("run", "unclear")),
        *([_explain_unclear(seen, unclear)] if unclear else []),
    )


def explain_nothing(reason: str, hint: str | None) -> Finding:
    """Returns the finding for a watch that failed."""
    text = f"could not watch ONNX Runtime make a session: {reason}"
    return Finding("gil-not-measured", "problem", text, hint)


def tabulate(seen: GilObservations) -> DiagnosisTable:
    """Returns the clearest call of every phase as a table."""
    verdicts = judge_phases(seen)
    rows = [_row(phase, calls, verdicts[phase]) for phase, calls in seen.phases.items()]
    rows.append(_row("known to release it", seen.released))
    rows.append(_row("known to hold it", seen.held))
    return DiagnosisTable(
        f"Do other Python threads run meanwhile? (ONNX Runtime {seen.onnxruntime})",
        ("phase", "takes ms", "longest gap ms", "gap share", "ticks", "lock"),
        tuple(rows),
    )


def _row(name: str, calls: Sequence[Call], verdict: Verdict | None = None) -> tuple[TableCell, ...]:
    call = clearest(calls)
    times_ms = round(call.elapsed_ms, 1), round(call.longest_gap_ms, 1)
    return name, *times_ms, round(call.gap_share, 3), call.ticks, verdict


def _judge_creation(seen: GilObservations, verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    start = f"ONNX Runtime {seen.onnxruntime}"
    if holding := [phase for phase, verdict in verdicts.items() if verdict in ("held", "partly")]:
        text = (
            f"{start} keeps the interpreter to itself while it makes a session: "
            f"no other thread ran for {_describe(seen, holding)}; threads that load at once take turns"
        )
        hint = f'{phrase_upgrade(seen.wheel)}, or load in processes: SessionPool("artifacts/NAME")'
        yield Finding("gil-held-in-creation", "advice", text, hint)
    elif released := [phase for phase, verdict in verdicts.items() if verdict == "released"]:
        text = f"{start} lets other threads run while it makes a session: the longest gap was "
        yield Finding("gil-released-in-creation", "good", text + _describe(seen, released))


def _judge_runs(seen: GilObservations, verdict: Verdict) -> Iterator[Finding]:
    if verdict == "unclear":
        return
    gap = _describe(seen, ["run"])
    if verdict == "released":
        text = f"other threads run while a session runs: the longest gap was {gap}"
        yield Finding("gil-released-in-run", "good", text)
        return
    text = (
        f"ONNX Runtime {seen.onnxruntime} keeps the interpreter to itself while a session runs: "
        f"no other thread ran for {gap}"
    )
    hint = 'serve from processes, which do not share an interpreter: SessionPool("artifacts/NAME")'
    yield Finding("gil-held-in-run", "problem" if verdict == "held" else "note", text, hint)


def _describe(seen: GilObservations, phases: Sequence[str]) -> str:
    calls = {phase: clearest(seen.phases[phase]) for phase in phases}
    return ", ".join(
        f"{call.longest_gap_ms:.1f} of {call.elapsed_ms:.1f} ms of {phase}" for phase, call in calls.items()
    )


def _explain_unclear(seen: GilObservations, phases: Sequence[str]) -> Finding:
    start = f"cannot tell who holds the interpreter in {', '.join(phases)}: "
    if not controls_agree(seen.released, seen.held):
        text = (
            f"{start}a call known to release it showed a gap of {clearest(seen.released).gap_share:.0%} of "
            f"its length, one known to hold it {clearest(seen.held).gap_share:.0%}"
        )
        return Finding("gil-unclear", "note", text, "run it again when the machine has less else to do")
    took = ", ".join(f"{clearest(seen.phases[phase]).elapsed_ms:.1f} ms" for phase in phases)
    text = f"{start}{took} is too short to say, on this machine it takes {min_call_ms(seen.released):.0f} ms"
    return Finding("gil-unclear", "note", text, "ortprep doctor gil  (it makes a model that is large enough)")
