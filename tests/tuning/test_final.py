"""The last comparison: who stays, who leaves, and when it is enough."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.children.probe import ProbeResult
from ortprep.errors import LoadError
from ortprep.measuring.comparison import MIN_ROUNDS, centre, paired_ratio
from ortprep.tuning.final import compare_finalists, pick_entrants, rank
from ortprep.tuning.space import DEFAULT, PlanChoice
from tests.tuning.builders import choices_of, cpu_space, per_load

SPACE = cpu_space()
PLANS = tuple(itertools.islice(choices_of(SPACE), 6))

positive = st.floats(0.01, 1e6)


class Track:
    """Measures plans whose true cost is known, with noise and drift."""

    def __init__(self, costs: dict[PlanChoice, float], *, noise: float = 0.0, seed: int = 0) -> None:
        self.costs, self.noise, self.chance = costs, noise, random.Random(seed)
        self.measured: Counter[PlanChoice] = Counter()
        self.fails: dict[PlanChoice, set[int]] = {}

    def measure(self, choice: PlanChoice) -> ProbeResult:
        number = self.measured[choice]
        self.measured[choice] += 1
        if number in self.fails.get(choice, ()):
            raise LoadError("crashed")
        cost = self.costs[choice] * math.exp(self.chance.gauss(0, self.noise))
        return ProbeResult(cost, 0.8 * cost, 0.2 * cost, 1.0, 100.0, 200.0)

    def compare(self, *, rounds: int = 12, time: float = math.inf) -> dict[PlanChoice, int]:
        """Returns how many rounds each plan was in."""
        candidates = tuple(choice for choice in self.costs if choice != DEFAULT)
        finals = compare_finalists(
            DEFAULT,
            candidates,
            (),
            per_load(1, rounds=rounds),
            measure=self.measure,
            has_time=lambda processes: self.measured.total() + processes <= time,
        )
        return {choice: len(figures) for choice, figures in finals.items()}


def costs(*values: float) -> dict[PlanChoice, float]:
    return {DEFAULT: 100.0, **dict(zip(PLANS, values, strict=False))}


def test_plans_far_behind_leave_after_the_least_rounds():
    rounds = Track(costs(10, 30, 10.1), noise=0.02).compare()
    assert rounds[PLANS[1]] == MIN_ROUNDS
    assert rounds[DEFAULT] == max(rounds.values())


def test_plans_that_are_close_are_measured_until_the_rounds_are_over():
    rounds = Track(costs(10, 10.3), noise=0.1).compare(rounds=7)
    assert set(rounds.values()) == {7}


def test_it_ends_with_the_time_but_never_before_the_least_rounds():
    track = Track(costs(10, 10.3, 10.2), noise=0.1)
    assert set(track.compare(time=0).values()) == {MIN_ROUNDS}
    track = Track(costs(10, 10.3, 10.2), noise=0.1)
    track.compare(time=18)
    assert MIN_ROUNDS * 4 < track.measured.total() <= 18


def test_a_plan_that_fails_once_is_out_and_the_default_may_once():
    track = Track(costs(10, 30))
    track.fails = {PLANS[0]: {1}, DEFAULT: {1}}
    rounds = track.compare()
    assert PLANS[0] not in rounds
    assert rounds[DEFAULT] == rounds[PLANS[1]] == MIN_ROUNDS


def test_a_default_that_fails_twice_keeps_its_rounds_and_the_others_have_the_least():
    track = Track(costs(10, 10.1), noise=0.1)
    track.fails = {DEFAULT: {1, 2}}
    assert track.compare() == {DEFAULT: 1, PLANS[0]: MIN_ROUNDS, PLANS[1]: MIN_ROUNDS}


def test_a_plan_beyond_a_limit_leads_nobody():
    track = Track(costs(10, 30, 30.2), noise=0.05)
    heavy = PLANS[0]

    def measure(choice: PlanChoice) -> ProbeResult:
        figures = track.measure(choice)
        return figures if choice != heavy else dataclasses.replace(figures, private_mb=900.0)

    finals = compare_finalists(
        DEFAULT,
        PLANS[:3],
        (),
        per_load(1, max_private_mb=500.0, rounds=7),
        measure=measure,
        has_time=lambda _: True,
    )
    assert {choice: len(figures) for choice, figures in finals.items()} == {
        DEFAULT: 7,
        heavy: MIN_ROUNDS,
        PLANS[1]: 7,
        PLANS[2]: 7,
    }


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.06])
def test_the_best_plan_hardly_ever_leaves(noise):
    true = costs(10, 10.2, 10.35, 10.5, 10.8, 11.2)
    runs = [Track(true, noise=noise, seed=seed).compare() for seed in range(200)]
    assert sum(rounds[PLANS[0]] < rounds[DEFAULT] for rounds in runs) <= 0.06 * len(runs)


def test_there_is_always_room_for_two_candidates_and_a_first():
    for most in range(8):
        candidates, firsts = pick_entrants(PLANS[:3], PLANS[2:], max_plans=most)
        assert candidates[:2] == PLANS[:2]
        assert len(firsts) >= 1
        assert len({*candidates, *firsts}) == len((*candidates, *firsts))
        assert len(firsts) == 1 or len((*candidates, *firsts)) < most


@given(st.lists(positive, min_size=1, max_size=9), st.floats(0.1, 10))
def test_a_paired_ratio_of_a_multiple_is_the_factor_whatever_the_rounds_were_like(values, factor):
    assert paired_ratio([factor * value for value in values], values) == pytest.approx(factor)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=9))
def test_a_paired_ratio_turned_round_is_its_inverse(pairs):
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    assert paired_ratio(one, other) == pytest.approx(1 / paired_ratio(other, one))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_a_centre_is_among_its_values_and_moves_with_them(values):
    middle = centre(values)
    assert min(values) - 1e-6 <= middle <= max(values) + 1e-6
    assert centre([value + 5 for value in values]) == pytest.approx(middle + 5, abs=1e-6)


def test_a_drift_that_all_plans_saw_is_no_noise():
    drift = (1.0, 3.0, 2.0)
    ranking = rank({PLANS[0]: [10 * d for d in drift], PLANS[1]: [10.2 * d for d in drift]})
    assert ranking.leader == PLANS[0]
    assert ranking.behind[PLANS[1]] == pytest.approx(math.log(1.02))
    assert ranking.error < 1e-9
    assert ranking.candidates() == (PLANS[0],)


def test_the_error_is_about_what_differences_of_noise_come_to():
    chance = random.Random(5)
    errors, differences = [], []
    for _ in range(300):
        noisy = {plan: [math.exp(chance.gauss(0, 0.05)) for _ in range(5)] for plan in PLANS[:4]}
        ranking = rank(noisy)
        errors.append(ranking.error)
        differences.append(math.log(paired_ratio(noisy[PLANS[0]], noisy[PLANS[1]])))
    true = math.sqrt(sum(one * one for one in differences) / len(differences))
    assert sum(errors) / len(errors) == pytest.approx(true, rel=0.2)
