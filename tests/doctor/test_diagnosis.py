from __future__ import annotations

import pytest

from ortprep.doctor.diagnosis import SEVERITIES, Finding, diagnose, exit_code_of


def test_findings_are_in_order_of_severity():
    found = diagnose("env", [Finding(one, one, "") for one in SEVERITIES])
    assert [one.severity for one in found.findings] == list(reversed(SEVERITIES))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_only_a_problem_is_a_failure(severity):
    assert exit_code_of([diagnose("env", [Finding("x", severity, "")])]) == (severity == "problem")
    assert exit_code_of([]) == 0
