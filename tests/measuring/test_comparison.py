"""Interleaved rounds, and which of two plans is smaller beyond the noise."""

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.children.probe import ProbeResult
from ortprep.errors import ChildError
from ortprep.measuring.comparison import is_below, order_of_round, run_interleaved

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


def test_of_equal_plans_one_is_seldom_called_smaller():
    chance = random.Random(7)

    def noisy(count):
        return [math.exp(chance.gauss(0, 0.05)) for _ in range(count)]

    for count, most in ((3, 0.12), (5, 0.11), (7, 0.07), (12, 0.04)):
        calls = [is_below(noisy(count), noisy(count)) for _ in range(3000)]
        assert sum(calls) / len(calls) < most


def test_a_clear_gap_survives_one_disturbed_round_in_five():
    assert is_below((46.0, 47.1, 45.9, 46.4, 5000.0), (230.0, 231.2, 229.1, 240.5, 233.0))


def test_gaps_that_the_rounds_do_not_agree_in_are_noise():
    assert not is_below((18.0, 19.5, 18.4, 20.1, 18.2), (18.1, 19.6, 18.5, 20.2, 18.3), min_gain=0.05)
    assert not is_below((1.0, 1.0, 1.0, 1.0, 50.0, 50.0), (9.0,) * 6)


PLANS = ("default", "recipe", "prepared", "portable")


def result(init_ms, *, gpu_mb=None):
    return ProbeResult(
        ready_ms=init_ms + 150.0,
        init_ms=init_ms,
        first_ms=10.0,
        steady_ms=8.0,
        runs=50,
        private_mb=64.0,
        peak_mb=200.0,
        gpu_mb=gpu_mb,
    )


@pytest.mark.parametrize("count", range(1, 8))
def test_every_round_runs_every_plan_once(count):
    plans = [f"plan{i}" for i in range(count)]
    for index in range(3 * count):
        assert sorted(order_of_round(plans, index)) == plans


@pytest.mark.parametrize("count", range(2, 8))
def test_every_plan_follows_every_other_equally_often(count):
    plans = [f"plan{i}" for i in range(count)]
    rounds = count if count % 2 == 0 else 2 * count
    neighbours = Counter()
    for index in range(rounds):
        order = order_of_round(plans, index)
        neighbours.update(itertools.pairwise(order))
    assert len(neighbours) == count * (count - 1)
    assert len(set(neighbours.values())) == 1


def test_a_plan_that_fails_once_leaves_the_comparison_and_the_others_go_on():
    attempts = Counter()

    def measure(plan):
        attempts[plan] += 1
        if plan == "recipe" and attempts[plan] == 2:
            raise ChildError("child process died: SIGSEGV")
        return result(float(attempts[plan]))

    runs = run_interleaved(PLANS, measure, max_rounds=4)
    assert runs.failures == {"recipe": "child process died: SIGSEGV"}
    assert list(runs.rounds) == ["default", "prepared", "portable"]
    assert all(len(results) == 4 for results in runs.rounds.values())
    assert attempts["recipe"] == 2


@pytest.mark.parametrize(("budget_s", "rounds"), [(0.0, 3), (math.inf, 5)])
def test_three_rounds_are_measured_however_long_they_take_and_others_while_there_is_time(budget_s, rounds):
    runs = run_interleaved(("a", "b"), str.upper, max_rounds=5, budget_s=budget_s)
    assert runs.rounds == {"a": ("A",) * rounds, "b": ("B",) * rounds}
