"""Result of a check of `ortprep doctor`: figures, tables and findings; and the conclusion from all checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from ortprep.tables import Table

Severity: TypeAlias = Literal["ok", "note", "advice", "problem"]
"""As it should be; worth knowing; something to gain; something to repair."""

SEVERITIES: tuple[Severity, ...] = ("ok", "note", "advice", "problem")

_UNITS = ("B", "kB", "MB", "GB", "TB")
_STEP = 1000
_MAX_STEPS = 6


@dataclass(frozen=True)
class Finding:
    """One thing a check found.

    Attributes:
        code: Stable name, for scripts: `both-wheels-installed`.
        severity: Its severity.
        text: The finding as a sentence, with its figure.
        hint: A command to run, or what to do; None where there is nothing to be done.
        saves_ms: At most so much of the time to a first result goes if it is done; None if that is not known.
    """

    code: str
    severity: Severity
    text: str
    hint: str | None = None
    saves_ms: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Result of one check.

    Attributes:
        check: Name of the check: `env`, `parallel`, `init`, …
        subject: Names of the models; "" for the machine.
        findings: The most severe first.
        tables: Tables of the figures, for people.
        figures: The same and more for programs, as JSON types.
    """

    check: str
    subject: str
    findings: tuple[Finding, ...]
    tables: tuple[Table, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)


def diagnose(
    check: str,
    findings: Sequence[Finding],
    *,
    subject: str = "",
    tables: Sequence[Table] = (),
    figures: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Returns a diagnosis, its findings in order of severity; tables without rows are left out."""
    ordered = sorted(findings, key=_rank, reverse=True)
    shown = tuple(table for table in tables if table.rows)
    return Diagnosis(check, subject, tuple(ordered), shown, dict(figures or {}))


def exit_code_of(diagnoses: Sequence[Diagnosis]) -> int:
    """Returns 1 if any check found a problem, else 0: what can merely be gained is no failure."""
    severities = {finding.severity for diagnosis in diagnoses for finding in diagnosis.findings}
    return int("problem" in severities)


def conclude(diagnoses: Sequence[Diagnosis], *, subject: str) -> Diagnosis:
    """Returns what dominates, what to do first and what it would save, each with the figure behind it."""
    start = next((one.figures for one in diagnoses if one.check == "init"), {})
    findings = (*_dominating(start.get("default") or start.get("prepared")), *_steps(diagnoses))
    nothing = Finding("nothing-found", "ok", "nothing to fix or gain")
    return Diagnosis("all", subject, findings or (nothing,))


def _dominating(start: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yields the largest part of a start, by the figures of `init`."""
    if not start:
        return
    parts = {
        "making the session": start["init_ms"],
        "importing numpy and ONNX Runtime": start["numpy_ms"] + start["onnxruntime_ms"],
        "what the first run takes beyond later ones": start["first_extra_ms"],
    }
    name = max(parts, key=lambda part: parts[part])
    text = f"what dominates: {name}, {parts[name]:.0f} ms of {start['total_ms']:.0f} ms to the first result"
    saved = start["saved_by_ms"]
    largest = max(saved, key=lambda code: saved[code], default="")
    if name == "making the session" and largest and saved[largest] >= parts[name] / 2:
        text += f"; most of it is {largest.replace('-', ' ')}, {saved[largest]:.0f} ms"
    yield Finding("what-dominates", "note", text)


def _steps(diagnoses: Sequence[Diagnosis]) -> Iterator[Finding]:
    """Yields every problem and what can be done, the most severe first, then what saves most."""
    steps: dict[str, list[tuple[str, Finding]]] = {}
    for diagnosis in diagnoses:
        for finding in diagnosis.findings:
            if finding.severity == "problem" or (finding.severity == "advice" and finding.hint is not None):
                steps.setdefault(finding.hint or finding.text, []).append((diagnosis.check, finding))
    joined = []
    for reasons in steps.values():
        worst = max((finding for _, finding in reasons), key=_rank)
        text = "; ".join(f"{check}: {finding.text}" for check, finding in reasons)
        saves_ms = sum(finding.saves_ms or 0.0 for _, finding in reasons) or None
        joined.append(replace(worst, text=text, saves_ms=saves_ms))
    joined.sort(key=lambda step: (_rank(step), step.saves_ms or 0.0), reverse=True)
    yield from joined[:_MAX_STEPS]
    if (rest := len(joined) - _MAX_STEPS) > 0:
        yield Finding("more-steps", "note", f"{rest} smaller steps are among the checks' findings")


def _rank(finding: Finding) -> int:
    return SEVERITIES.index(finding.severity)


def format_bytes(count: float) -> str:
    """Returns a size: `64.2 MB`."""
    unit = 0
    while count >= _STEP and unit < len(_UNITS) - 1:
        count /= _STEP
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"
