"""Result of a check of `ortprep doctor`: figures, tables and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ortprep.tables import Table

Severity: TypeAlias = Literal["ok", "note", "advice", "problem"]
"""As it should be; worth knowing; something to gain; something to repair."""

SEVERITIES: tuple[Severity, ...] = ("ok", "note", "advice", "problem")

_UNITS = ("B", "kB", "MB", "GB", "TB")
_STEP = 1000


@dataclass(frozen=True)
class Finding:
    """One thing a check found.

    Attributes:
        code: Stable name, for scripts: `both-wheels-installed`.
        severity: Its severity.
        text: The finding as a sentence, with its figure.
        hint: A command to run, or what to do; None where there is nothing to be done.
    """

    code: str
    severity: Severity
    text: str
    hint: str | None = None


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

    @property
    def exit_code(self) -> int:
        """1 if a finding is a problem, else 0: what can merely be gained is no failure."""
        return int(any(finding.severity == "problem" for finding in self.findings))


def diagnose(
    check: str,
    findings: Sequence[Finding],
    *,
    subject: str = "",
    tables: Sequence[Table] = (),
    figures: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Returns a diagnosis, its findings in order of severity; tables without rows are left out."""
    ordered = sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity), reverse=True)
    shown = tuple(table for table in tables if table.rows)
    return Diagnosis(check, subject, tuple(ordered), shown, dict(figures or {}))


def format_bytes(count: float) -> str:
    """Returns a size: `64.2 MB`."""
    unit = 0
    while count >= _STEP and unit < len(_UNITS) - 1:
        count /= _STEP
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.3g} {_UNITS[unit]}"
