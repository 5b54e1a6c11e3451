"""Which of two plans is smaller beyond the noise, by pairs of the same rounds."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.figures import Samples
from ortprep.measuring.comparison import is_apart, is_below

positive = st.floats(0.01, 1e6)
rounds = st.lists(st.tuples(positive, positive), min_size=3, max_size=12)


@given(rounds)
def test_no_two_plans_are_each_below_the_other(pairs):
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    assert not (is_below(one, other) and is_below(other, one))


@given(rounds, st.lists(st.floats(0.1, 10), min_size=12, max_size=12))
def test_a_machine_that_changes_its_speed_between_rounds_changes_nothing(pairs, speeds):
    ratios = [math.log(a / b) for a, b in pairs]
    if abs(sum(log < 0 for log in ratios) - 0.8 * len(ratios)) < 1e-9 or min(map(abs, ratios)) < 1e-6:
        return  # on the edge, where rounding decides
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    faster = is_below(
        [a * s for a, s in zip(one, speeds, strict=False)],
        [b * s for b, s in zip(other, speeds, strict=False)],
    )
    assert faster == is_below(one, other)


def test_a_gap_that_drift_hides_from_quartiles_is_seen():
    drift = (1.0, 1.3, 1.6)
    below, above = [9.0 * d for d in drift], [10.0 * d for d in drift]
    assert not is_apart(Samples.of(below), Samples.of(above))
    assert is_below(below, above)


@given(rounds, st.floats(0.1, 10))
def test_the_unit_of_a_figure_changes_no_verdict(pairs, unit):
    below, above = [a for a, _ in pairs], [a * 1.5 for a, _ in pairs]
    scaled = [value * unit for value in below], [value * unit for value in above]
    assert is_below(*scaled, min_gain=0.05) == is_below(below, above, min_gain=0.05)


@given(rounds, st.floats(0, 1), st.floats(0, 1))
def test_who_beats_by_more_beats_by_less(pairs, one_least, other_least):
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    less, more = sorted((one_least, other_least))
    assert is_below(one, other, min_gain=less) or not is_below(one, other, min_gain=more)


def test_a_gain_too_small_to_count_is_none_however_sure():
    assert not is_below([100.0] * 3, [104.0] * 3, min_gain=0.05)
    assert is_below([100.0] * 3, [106.0] * 3, min_gain=0.05)
    assert not is_below([100.0] * 3, [106.0] * 3, min_gain=0.1)
    assert is_below([100.0] * 3, [104.0] * 3, min_gain=0)


def test_two_rounds_say_nothing():
    assert not is_below([1.0, 1.0], [9.0, 9.0], min_gain=0.05)


def test_of_equal_plans_one_is_seldom_called_smaller():
    chance = random.Random(7)

    def noisy(count: int) -> list[float]:
        return [math.exp(chance.gauss(0, 0.05)) for _ in range(count)]

    for count, most in ((3, 0.12), (5, 0.11), (7, 0.07), (12, 0.04)):
        calls = [is_below(noisy(count), noisy(count)) for _ in range(3000)]
        assert sum(calls) / len(calls) < most


def test_a_clear_gap_survives_one_disturbed_round_in_five():
    assert is_below((46.0, 47.1, 45.9, 46.4, 5000.0), (230.0, 231.2, 229.1, 240.5, 233.0))


def test_gaps_that_the_rounds_do_not_agree_in_are_noise():
    assert not is_below((18.0, 19.5, 18.4, 20.1, 18.2), (18.1, 19.6, 18.5, 20.2, 18.3), min_gain=0.05)
    assert not is_below((1.0, 1.0, 1.0, 1.0, 50.0, 50.0), (9.0,) * 6)


def test_rounds_of_one_plan_only_cannot_be_paired():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        is_below((1.0, 1.0, 1.0), (2.0, 2.0, 2.0, 2.0))
