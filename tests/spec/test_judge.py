"""What a spec says of automatic precision, and of the application that judges it."""

from __future__ import annotations

from typing import Any

import pytest

from ortprep.errors import SpecError
from ortprep.spec.conversion import ConvertSpec
from ortprep.spec.validation import parse_spec


def convert(**section: Any) -> ConvertSpec:
    spec = parse_spec({"name": "net", "source": {"path": "net.onnx"}, "convert": section})
    assert spec.convert is not None
    return spec.convert


def test_auto_tries_what_a_target_can_run_faster_and_steps_down_to_fp32():
    section = convert(precision="auto")
    assert section.precisions("cpu") == ("int8",)
    assert section.precisions("cuda") == ("fp16",)
    assert section.steps_below == ("fp32",)
    assert convert(precision="int8").steps_below == ()
    assert convert(precision="auto", ladder=["mixed", "fp32"]).steps_below == ("mixed", "fp32")


def test_a_judge_replaces_the_default_thresholds_and_no_others():
    judge = {"run": ["python", "app.py"]}
    assert convert(precision="auto").thresholds() == {"": {"cosine": 0.99, "snr_db": 20.0}}
    assert convert(precision="auto", judge=judge).thresholds() == {"": {}}
    gate = {"top1": 0.9, "outputs": {"y": {"max_abs": 2.0}}}
    own = convert(precision="auto", judge=judge, gate=gate).thresholds()
    assert own == {"": {"top1": 0.9}, "y": {"max_abs": 2.0, "top1": 0.9}}


@pytest.mark.parametrize(
    ("compare", "function"),
    [
        ("stdout", None),
        ("out/answers.txt", None),
        ("compare.py:same", (".", "compare:same")),
        ("../own/compare.py:same", ("../own", "compare:same")),
        ("C:answers", None),
    ],
)
def test_a_function_is_a_file_and_a_name(compare, function):
    judge = convert(judge={"run": ["app"], "compare": compare}).judge
    assert judge is not None
    assert judge.function == function


@pytest.mark.parametrize(
    "judge",
    [
        {},
        {"run": []},
        {"run": [""]},
        {"run": ["app", "a\0b"]},
        {"run": ["app"], "min_agreement": 1.1},
        {"run": ["app"], "timeout_s": 0},
        {"run": ["app"], "compare": ""},
        {"run": ["app"], "speed": 2},
    ],
)
def test_a_judge_that_cannot_be_is_refused(judge):
    with pytest.raises(SpecError):
        convert(precision="auto", judge=judge)


def test_an_argument_may_be_empty():
    judge = convert(judge={"run": ["app", "", "x"]}).judge
    assert judge is not None
    assert judge.run == ("app", "", "x")
