"""What rules are made of: the codes they write, and cases in which they must come out."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortprep.doctor.diagnosis import Finding, Severity


@dataclass(frozen=True)
class RuleCase:
    """A case, and a finding that must be among what is said of it."""

    code: str
    severity: Severity
    findings: Sequence[Finding]

    @property
    def is_found(self) -> bool:
        return (self.code, self.severity) in {(finding.code, finding.severity) for finding in self.findings}


def name_case(case: RuleCase) -> str:
    return f"{case.code}-{case.severity}"


def codes(findings: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def written_codes(*modules: str) -> set[str]:
    """The code of every `Finding(…)` in modules: a literal, or an entry of a table of theirs."""
    return {code for module in modules for code in _codes_in(module)}


def _codes_in(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
            code = node.args[0]
            if isinstance(code, ast.Subscript):
                assert isinstance(code.value, ast.Name)
                yield from getattr(module, code.value.id).values()
            else:
                assert isinstance(code, ast.Constant)
                yield str(code.value)
