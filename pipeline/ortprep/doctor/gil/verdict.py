"""Conclusions from ticks about the interpreter's lock. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Literal

from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.gil.heartbeat import Call, GilObservations
from ortprep.tables import CellValue, Table
from ortprep.versions import parse_version

RELEASED_FROM = (1, 31)
"""First ONNX Runtime that lets other threads run while it makes a session (microsoft/onnxruntime #27063)."""

UPGRADE = f"install ONNX Runtime {'.'.join(map(str, RELEASED_FROM))} or later"
"""A hint: such a version makes sessions in threads at once."""

Verdict = Literal["held", "released", "unclear"]
"""State of the interpreter's lock during a phase."""

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


def judge(calls: Sequence[Call], *, released: Sequence[Call]) -> Verdict:
    """Says whether a phase's calls, at least one, hold the lock; by calls known to release it."""
    call, control = clearest(calls), clearest(released)
    if call.elapsed_ms < min_call_ms(released) or control.gap_share > RELEASED_SHARE:
        return "unclear"
    if call.gap_share >= HELD_SHARE or call.tick_rate < HELD_PACE * control.tick_rate:
        return "held"
    return "released" if call.gap_share <= RELEASED_SHARE else "unclear"


def judge_phases(observations: GilObservations) -> dict[str, Verdict]:
    """Returns the verdict on every phase."""
    return {
        phase: judge(calls, released=observations.released) for phase, calls in observations.phases.items()
    }


def find_in(observations: GilObservations) -> tuple[Finding, ...]:
    """Returns the findings."""
    verdicts = judge_phases(observations)
    creation = {phase: verdicts[phase] for phase in CREATING if phase in verdicts}
    return (
        *_judge_creation(observations, creation),
        *_judge_runs(observations, verdicts.get("run", "unclear")),
        *_explain_unclear(observations, [name for name, verdict in verdicts.items() if verdict == "unclear"]),
    )


def tabulate(observations: GilObservations) -> Table:
    """Returns the clearest call of every phase as a table."""
    verdicts = judge_phases(observations)
    rows = [_row(phase, calls, verdicts[phase]) for phase, calls in observations.phases.items()]
    rows.append(_row("known to release it", observations.released))
    return Table(
        f"Do other Python threads run meanwhile? (ONNX Runtime {observations.onnxruntime})",
        ("phase", "takes ms", "longest gap ms", "gap share", "ticks", "lock"),
        tuple(rows),
    )


def _row(name: str, calls: Sequence[Call], verdict: Verdict | None = None) -> tuple[CellValue, ...]:
    call = clearest(calls)
    times_ms = round(call.elapsed_ms, 1), round(call.longest_gap_ms, 1)
    return name, *times_ms, round(call.gap_share, 3), call.ticks, verdict


def _judge_creation(observations: GilObservations, verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    version = f"ONNX Runtime {observations.onnxruntime}"
    if holding := [phase for phase, verdict in verdicts.items() if verdict == "held"]:
        text = (
            f"{version} keeps the interpreter to itself while it makes a session: no other thread ran for "
            f"{_describe(observations, holding)}; threads that load at once take turns"
        )
        hint = f'{UPGRADE}, or load in processes: SessionPool("artifacts/NAME")'
        yield Finding("gil-held-in-creation", "advice", text, hint)
    elif released := [phase for phase, verdict in verdicts.items() if verdict == "released"]:
        text = f"{version} lets other threads run while it makes a session: the longest gap was "
        yield Finding("gil-released-in-creation", "ok", text + _describe(observations, released))


def _judge_runs(observations: GilObservations, verdict: Verdict) -> Iterator[Finding]:
    if verdict == "released":
        text = (
            f"other threads run while a session runs: the longest gap was {_describe(observations, ['run'])}"
        )
        yield Finding("gil-released-in-run", "ok", text)
    elif verdict == "held":
        text = (
            f"ONNX Runtime {observations.onnxruntime} keeps the interpreter to itself while a session runs: "
            f"no other thread ran for {_describe(observations, ['run'])}"
        )
        hint = 'serve from processes, which do not share an interpreter: SessionPool("artifacts/NAME")'
        yield Finding("gil-held-in-run", "problem", text, hint)


def _describe(observations: GilObservations, phases: Sequence[str]) -> str:
    calls = {phase: clearest(observations.phases[phase]) for phase in phases}
    return ", ".join(
        f"{call.longest_gap_ms:.1f} of {call.elapsed_ms:.1f} ms of {phase}" for phase, call in calls.items()
    )


def _explain_unclear(observations: GilObservations, phases: Sequence[str]) -> Iterator[Finding]:
    if phases:
        text = (
            f"cannot tell who holds the interpreter: {_describe(observations, phases)}; on this machine a "
            f"call needs at least {min_call_ms(observations.released):.0f} ms to tell, and one known to "
            f"release it had a gap of {clearest(observations.released).gap_share:.0%} of its length"
        )
        hint = "ortprep doctor gil  (it makes a model that is large enough), when the machine is less busy"
        yield Finding("gil-unclear", "note", text, hint)
