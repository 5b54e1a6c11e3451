from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.tuning_record import FrontRecord
from ortprep.children.probe import ProbeResult
from ortprep.tuning.front import find_break_evens, find_front, points_of
from ortprep.tuning.objective import Trial
from ortprep.tuning.space import DEFAULT
from tests.tuning.builders import cpu_space, per_load
from tests.tuning.test_objective import ANCHOR, SOON, STEADY

SPACE = cpu_space()

eighths = st.integers(1, 8_000).map(lambda number: number / 8)
"""Milliseconds that floating-point numbers add and multiply without rounding."""

points = st.lists(st.tuples(eighths, eighths), min_size=1, max_size=30).map(
    lambda pairs: [FrontRecord(number, first, steady) for number, (first, steady) in enumerate(pairs)]
)


def trial(*figures: ProbeResult) -> Trial:
    return Trial(0, "screening", SPACE.base, figures, (ANCHOR,) * len(figures))


def cost_at(runs: int, point: FrontRecord) -> float:
    return point.first_result_ms + (runs - 1) * point.steady_ms


def dominates(one: FrontRecord, other: FrontRecord) -> bool:
    return one.first_result_ms <= other.first_result_ms and one.steady_ms <= other.steady_ms


@given(points)
def test_no_plan_of_a_front_is_beaten_in_both_figures_and_every_other_is(plans: list[FrontRecord]) -> None:
    front = find_front(plans)
    assert not any(dominates(one, other) and not dominates(other, one) for one in plans for other in front)
    assert all(any(dominates(one, other) for one in front) for other in plans)


@given(points)
def test_a_front_goes_from_the_soonest_first_result_to_the_shortest_run(plans: list[FrontRecord]) -> None:
    front = find_front(plans)
    assert front[0].first_result_ms == min(plan.first_result_ms for plan in plans)
    assert front[-1].steady_ms == min(plan.steady_ms for plan in plans)
    firsts, steadies = [p.first_result_ms for p in front], [p.steady_ms for p in front]
    assert firsts == sorted(set(firsts))
    assert steadies == sorted(set(steadies), reverse=True)


@given(points, st.integers(1, 10_000))
def test_the_break_evens_name_the_cheapest_plan_at_any_number_of_runs(
    plans: list[FrontRecord], runs: int
) -> None:
    front = find_front(plans)
    by_number = {plan.trial: plan for plan in plans}
    current = front[0]
    for one in find_break_evens(front):
        assert one.sooner == current.trial
        if one.runs > runs:
            break
        current = by_number[one.steadier]
    assert cost_at(runs, current) == min(cost_at(runs, plan) for plan in plans)


@given(points)
def test_one_run_before_a_break_even_the_sooner_plan_still_costs_no_more(plans: list[FrontRecord]) -> None:
    by_number = {plan.trial: plan for plan in plans}
    for one in find_break_evens(find_front(plans)):
        sooner, steadier = by_number[one.sooner], by_number[one.steadier]
        assert cost_at(one.runs, steadier) < cost_at(one.runs, sooner)
        assert cost_at(one.runs - 1, steadier) >= cost_at(one.runs - 1, sooner)


def test_prepacking_a_transformer_is_worth_it_from_the_twenty_sixth_run_on() -> None:
    front = find_front([FrontRecord(1, 86.0, 31.0), FrontRecord(2, 304.0, 22.0), FrontRecord(0, 623.0, 22.0)])
    assert [point.trial for point in front] == [1, 2]
    (one,) = find_break_evens(front)
    assert (one.sooner, one.steadier, one.runs) == (1, 2, 26)


def test_a_point_is_the_medians_of_a_trial() -> None:
    (point,) = points_of([trial(SOON, SOON, STEADY)], per_load(1), finals={}, anchor=DEFAULT)
    assert point == FrontRecord(0, 86.0, 31.0)


def test_figures_of_the_last_comparison_count_before_those_of_a_trial() -> None:
    slower = dataclasses.replace(SOON, ready_ms=186.0)
    finals = {SPACE.base: (slower,) * 3, DEFAULT: (ANCHOR,) * 5}
    (point,) = points_of([trial(SOON)], per_load(1), finals=finals, anchor=DEFAULT)
    assert point == FrontRecord(0, 186.0, 31.0)


def test_a_plan_beyond_a_limit_has_no_place() -> None:
    assert points_of([trial(SOON)], per_load(1, max_private_mb=100.0), finals={}, anchor=DEFAULT) == ()
