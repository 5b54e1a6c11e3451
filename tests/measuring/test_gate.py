"""What passes the gate: everything within its bounds, and nothing that was not looked at."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.measuring.gate import find_gate_failures

LOGITS = OutputAccuracy("logits", 100, max_abs=0.5, mean_abs=0.1, cosine=0.871, snr_db=6.2, top1=0.9)


def judge_one(bounds: dict[str, float], accuracy: OutputAccuracy = LOGITS) -> tuple[str, ...]:
    return find_gate_failures({"": bounds}, [accuracy])


@pytest.mark.parametrize(
    ("bounds", "failure"),
    [
        ({"max_abs": 0.4}, "largest absolute difference 0.5, expected at most 0.4"),
        ({"mean_abs": 0.01}, "mean absolute difference 0.1, expected at most 0.01"),
        ({"cosine": 0.995}, "cosine 0.871, expected at least 0.995"),
        ({"snr_db": 20}, "signal-to-noise ratio in dB 6.2, expected at least 20"),
        ({"top1": 0.99}, "top-1 agreement 0.9, expected at least 0.99"),
        ({"cosine": 0.8710001}, "cosine 0.871, expected at least 0.8710001"),
    ],
)
def test_a_figure_beyond_its_bound_is_told_with_both(bounds, failure):
    assert judge_one(bounds) == (f"output 'logits': {failure}",)


@given(st.sampled_from(["max_abs", "mean_abs", "cosine", "snr_db", "top1"]))
def test_the_bound_itself_passes(figure):
    assert not judge_one({figure: getattr(LOGITS, figure)})


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_figure_and_a_bound_that_differ_are_never_told_alike(value, bound):
    accuracy = dataclasses.replace(LOGITS, cosine=value)
    for failure in judge_one({"cosine": bound}, accuracy):
        shown, wanted = failure.removeprefix("output 'logits': cosine ").split(", expected at least ")
        assert float(shown) < float(wanted)


def test_an_output_with_bounds_of_its_own_has_no_others():
    gate = {"": {"cosine": 0.99}, "logits": {"top1": 0.9}}
    assert not find_gate_failures(gate, [LOGITS])
    assert find_gate_failures(gate, [LOGITS, dataclasses.replace(LOGITS, output="other")])


def test_a_tensor_of_a_sequence_has_the_bounds_of_the_whole():
    strict = {"cosine": 0.99}
    for name, whole in (("past[3]", "past"), ("past[3][k[1]]", "past"), ("past[3][k]", "past[3]")):
        tensor = dataclasses.replace(LOGITS, output=name)
        assert find_gate_failures({whole: strict}, [tensor])
        assert find_gate_failures({whole: strict, name: {}}, [tensor]) == (
            f"output {whole!r} has thresholds and was not compared, expected one of: {name!r}",
        )


def test_what_cannot_be_ranked_fails_only_a_bound_of_its_own():
    accuracy, bound = OutputAccuracy("logits", 1), {"top1": 0.5}
    assert not find_gate_failures({"": bound}, [accuracy])
    failures = find_gate_failures({"logits": bound}, [accuracy])
    assert failures == ("output 'logits': top-1 agreement is set, but no row of it has two elements or more",)


def test_no_bounds_excuse_infinities_and_outputs_that_cannot_be_compared():
    infinite = judge_one({}, dataclasses.replace(LOGITS, nonfinite=3))
    assert infinite == ("output 'logits': NaN or infinity differs in 3 of 100 elements",)
    reason = "shape: expected [2], got [3]"
    mismatch = judge_one({"max_abs": 0}, dataclasses.replace(LOGITS, reason=reason))
    assert mismatch == (f"output 'logits' cannot be compared: {reason}",)


def test_a_bound_that_nobody_looked_at_does_not_pass():
    assert find_gate_failures({}, []) == ("no output was compared",)
    misspelt = find_gate_failures({"logitz": {"cosine": 0}}, [LOGITS])
    assert misspelt == ("output 'logitz' has thresholds and was not compared, expected one of: 'logits'",)


def test_a_figure_that_is_no_number_does_not_pass():
    nan = dataclasses.replace(LOGITS, cosine=float("nan"), max_abs=float("nan"))
    assert len(judge_one({"cosine": -1, "max_abs": 1e300}, nan)) == 2
