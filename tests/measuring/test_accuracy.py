"""Figures of accuracy are what their formulas say, and what passes the gate is within its bounds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ortprep.bundle.conversion_record import OutputAccuracy
from ortprep.children.answers import Answer
from ortprep.measuring.accuracy import SNR_CAP_DB, compare_answers, compare_arrays, find_gate_failures
from ortprep.runtime.tensors.element_types import to_bfloat16
from tests.runtime.test_laws import ARRAYS, BLOCKS

NAN, INF = float("nan"), float("inf")


def measure(*pairs, block_elements=1000):
    triples = (("y", np.asarray(expected), np.asarray(got)) for expected, got in pairs)
    (found,) = compare_arrays(triples, block_elements=block_elements)
    return found


@given(array=ARRAYS, block=BLOCKS)
def test_an_array_is_perfectly_accurate_against_itself(array, block):
    found = measure((array, array.copy()), block_elements=block)
    assert (found.max_abs, found.nonfinite, found.reason) == (0, 0, "")
    assert found.snr_db == SNR_CAP_DB
    assert found.top1 in (None, 1)


@given(data=st.data(), block=BLOCKS)
def test_figures_are_their_formulas_whatever_the_block(data, block):
    shape = data.draw(hnp.array_shapes(min_side=2, max_side=6))
    elements = st.integers(-50, 50).map(float)
    expected, got = (data.draw(hnp.arrays(np.float32, shape, elements=elements)) for _ in range(2))
    found = measure((expected, got), block_elements=block)
    left, right = expected.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    noise = ((left - right) ** 2).sum()
    assert found.max_abs == np.abs(left - right).max()
    if noise and left.any():
        assert found.snr_db == pytest.approx(10 * np.log10(left @ left / noise), abs=1e-9)
    chosen = np.take_along_axis(expected, got.argmax(-1)[..., None], -1)[..., 0]
    assert found.top1 == pytest.approx((chosen == expected.max(-1)).mean())


def test_a_sample_that_is_off_is_not_averaged_away():
    good = (np.ones(1000), np.ones(1000))
    found = measure(good, good, ([3.0, 4.0], [-3.0, -4.0]), good)
    assert found.snr_db == pytest.approx(10 * np.log10(25 / 100))
    assert found.max_abs == 8
    assert found.elements == 3002


def test_a_candidate_that_lost_all_differences_does_not_agree():
    expected = np.arange(20.0).reshape(4, 5)
    for lost in (0.0, NAN, -INF):
        assert measure((expected, np.full((4, 5), lost))).top1 == 0


@pytest.mark.parametrize("array", [np.ones(()), np.ones((3, 1)), np.ones((0, 4)), np.ones((4, 0))])
def test_without_rows_of_two_elements_there_is_no_ranking(array):
    assert measure((array, array)).top1 is None


@pytest.mark.parametrize("convert", [np.float16, to_bfloat16])
def test_a_narrowed_output_is_compared_by_its_values(convert):
    expected = np.array([1.0, -2.5, 448.0], np.float32)  # each has at most three significant bits
    found = measure((expected, convert(expected)))
    assert found.reason == ""
    assert found.max_abs == 0


@pytest.mark.parametrize(
    ("expected", "got", "nonfinite"),
    [
        ([NAN, INF, -INF, 1.0], [NAN, INF, -INF, 1.0], 0),
        ([NAN, 1.0], [1.0, 1.0], 1),
        ([1.0, 1.0], [NAN, INF], 2),
        ([INF, -INF], [-INF, -INF], 1),
        ([INF, NAN], [NAN, INF], 2),
    ],
)
def test_what_is_not_finite_is_counted_where_it_differs_and_nowhere_else(expected, got, nonfinite):
    found = measure((expected, got))
    assert found.nonfinite == nonfinite
    assert (found.max_abs, found.snr_db, found.elements) == (0, SNR_CAP_DB, len(expected))


def test_zeros_that_are_not_met_are_as_noisy_as_can_be():
    found = measure((np.zeros(3), [0.0, 1e-30, 0.0]))
    assert found.snr_db == -SNR_CAP_DB
    silent = measure((np.ones(3), np.zeros(3)))
    assert silent.snr_db == 0


@pytest.mark.parametrize("scale", [1e200, 1e308])
def test_numbers_whose_squares_leave_the_range_are_as_noisy_as_can_be(scale):
    expected, got = np.array([1.0, 1.0]) * scale, np.array([1.0, -1.0]) * scale
    found = measure((expected, got))
    assert found.snr_db == -SNR_CAP_DB
    assert 0 < found.max_abs < INF


def test_integers_booleans_and_strings_agree_where_they_are_equal():
    big = np.array([2**63, 2**63 + 1], np.uint64)
    assert measure((big, big[::-1])).max_abs == 1
    assert measure((big, big[::-1])).top1 == 0
    assert measure(([1, 2, 3, 4], [1, 2, 3, 5])).top1 == 0.75
    assert measure(([True, False], [True, True])).top1 == 0.5
    strings = measure((["a", "b", "c", "d"], ["a", "b", "c", "dd"]))
    assert (strings.top1, strings.max_abs) == (0.75, 1)
    assert strings.snr_db == pytest.approx(10 * np.log10(4))


@pytest.mark.parametrize(
    ("expected", "got", "reason"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), "shape: expected [2, 3], got [3, 2]"),
        (np.zeros(2, np.int64), np.zeros(2, np.int32), "element type: expected int64, got int32"),
        (np.zeros(2, np.float32), np.zeros(2, np.int32), "element type: expected float32, got int32"),
        (np.array(["0"]), np.zeros(1), "element type: expected string, got float64"),
    ],
)
def test_what_cannot_be_compared_has_a_reason_beside_the_figures_of_the_rest(expected, got, reason):
    found = measure(([1.0], [2.0]), (expected, got), ([1.0], [1.0]))
    assert found.reason == reason
    assert (found.elements, found.max_abs) == (2, 1)


def test_answers_are_compared_by_name_and_none_is_overlooked(tmp_path):
    def answer(output, values):
        file = tmp_path / f"{output}.npy"
        np.save(file, np.array(values))
        return Answer(output, str(file))

    expected = [answer(name, [1.0, 2.0]) for name in ("a", "b")]
    got = {"a": np.array([1.0, 3.0])}
    found = {accuracy.output: accuracy for accuracy in compare_answers([expected], [got])}
    assert list(found) == ["a", "b"]
    assert (found["a"].max_abs, found["a"].top1, found["a"].reason) == (1, 1, "")
    assert found["b"].reason == "the converted model did not return it"


LOGITS = OutputAccuracy("logits", 100, max_abs=0.5, snr_db=6.2, top1=0.9)


def judge_one(bounds, accuracy=LOGITS):
    return find_gate_failures({"": bounds}, [accuracy])


@pytest.mark.parametrize(
    ("bounds", "failure"),
    [
        ({"max_abs": 0.4}, "largest absolute difference 0.5, expected at most 0.4"),
        ({"snr_db": 20}, "signal-to-noise ratio in dB 6.2, expected at least 20"),
        ({"top1": 0.99}, "top-1 agreement 0.9, expected at least 0.99"),
        ({"top1": 0.9000001}, "top-1 agreement 0.9, expected at least 0.9000001"),
    ],
)
def test_a_figure_beyond_its_bound_is_told_with_both(bounds, failure):
    assert judge_one(bounds) == (f"output 'logits': {failure}",)


@given(st.sampled_from(["max_abs", "snr_db", "top1"]))
def test_the_bound_itself_passes(figure):
    assert not judge_one({figure: getattr(LOGITS, figure)})


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_figure_and_a_bound_that_differ_are_never_told_alike(value, bound):
    accuracy = dataclasses.replace(LOGITS, top1=value)
    for failure in judge_one({"top1": bound}, accuracy):
        shown, wanted = failure.removeprefix("output 'logits': top-1 agreement ").split(
            ", expected at least "
        )
        assert float(shown) < float(wanted)


def test_an_output_with_bounds_of_its_own_has_no_others():
    gate = {"": {"snr_db": 20}, "logits": {"top1": 0.9}}
    assert not find_gate_failures(gate, [LOGITS])
    assert find_gate_failures(gate, [LOGITS, dataclasses.replace(LOGITS, output="other")])


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


def test_a_gate_that_no_output_was_held_against_is_not_passed():
    assert find_gate_failures({}, []) == ("no output was compared",)


def test_a_figure_that_is_no_number_does_not_pass():
    nan = dataclasses.replace(LOGITS, snr_db=float("nan"), max_abs=float("nan"))
    assert len(judge_one({"snr_db": -1, "max_abs": 1e300}, nan)) == 2
