from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.doctor.diagnosis import SEVERITIES, Finding, conclude, diagnose, exit_code_of


def test_findings_are_in_order_of_severity():
    found = diagnose("env", [Finding(one, one, "") for one in SEVERITIES])
    assert [one.severity for one in found.findings] == list(reversed(SEVERITIES))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_only_a_problem_is_a_failure(severity):
    assert exit_code_of([diagnose("env", [Finding("x", severity, "")])]) == (severity == "problem")
    assert exit_code_of([]) == 0


def start(**changes: float) -> dict[str, object]:
    figures: dict[str, object] = {
        "init_ms": 300.0,
        "numpy_ms": 40.0,
        "onnxruntime_ms": 30.0,
        "first_extra_ms": 5.0,
        "total_ms": 390.0,
        "saved_by_ms": {"optimised-at-every-load": 200.0, "weights-inside-the-model-file": 80.0},
    }
    return {"default": {**figures, **changes}}


def text_of(**changes: float) -> str:
    found = conclude([diagnose("init", [], subject="net", figures=start(**changes))], subject="net")
    return found.findings[0].text


def test_what_dominates_is_said_with_its_figure():
    assert "making the session, 300 ms of 390 ms" in text_of()
    assert "optimised at every load, 200 ms" in text_of()
    assert "what the first run takes beyond later ones, 900 ms" in text_of(first_extra_ms=900.0)
    assert "importing numpy and ONNX Runtime, 630 ms" in text_of(numpy_ms=600.0)
    assert "most of it" not in text_of(init_ms=1000.0)


def test_problems_come_first_and_a_step_is_told_once_with_all_it_gains():
    diagnoses = [
        diagnose("init", [Finding("a", "advice", "slow", "ortprep prepare")]),
        diagnose("options", [Finding("b", "advice", "slower", "ortprep prepare")]),
        diagnose(
            "env", [Finding("c", "problem", "broken", "mend it"), Finding("d", "note", "said", "no step")]
        ),
    ]
    steps = conclude(diagnoses, subject="net").findings
    assert [(one.severity, one.hint) for one in steps] == [
        ("problem", "mend it"),
        ("advice", "ortprep prepare"),
    ]
    assert [one.text for one in steps] == ["env: broken", "init: slow; options: slower"]


def test_where_nothing_is_found_that_is_said():
    assert [one.severity for one in conclude([], subject="net").findings] == ["ok"]


def test_what_saves_most_comes_first():
    findings = [
        Finding("small", "advice", "small", "first hint", saves_ms=10.0),
        Finding("large", "advice", "large", "second hint", saves_ms=700.0),
        Finding("more", "advice", "more", "second hint", saves_ms=100.0),
    ]
    steps = conclude([diagnose("init", findings)], subject="net").findings
    assert [(one.code, one.saves_ms) for one in steps] == [("large", 800.0), ("small", 10.0)]


@given(st.lists(st.tuples(st.sampled_from(SEVERITIES), st.sampled_from([None, "a", "b"])), max_size=30))
def test_a_failure_is_always_in_the_conclusion(found):
    diagnoses = [diagnose("env", [Finding("x", severity, "text", hint) for severity, hint in found])]
    assert exit_code_of([conclude(diagnoses, subject="net")]) == exit_code_of(diagnoses)


def test_what_is_left_out_is_counted():
    findings = [Finding(f"f{i}", "advice", "text", f"hint {i}") for i in range(9)]
    *steps, rest = conclude([diagnose("env", findings)], subject="net").findings
    assert len(steps) == 6
    assert rest.code == "more-steps"
    assert rest.text.startswith("3 smaller steps")
