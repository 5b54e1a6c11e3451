from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.tuning.objective import (
    Figures,
    Objective,
    Point,
    Trial,
    find_break_evens,
    find_front,
    points_of,
    summary_values,
)
from pipeline.tuning.space import DEFAULT

SOON = Figures(init_ms=50.0, first_ms=36.0, steady_ms=31.0, private_mb=300.0, peak_mb=500.0)
STEADY = Figures(init_ms=270.0, first_ms=34.0, steady_ms=22.0, private_mb=700.0, peak_mb=900.0)
ANCHOR = Figures(init_ms=580.0, first_ms=43.0, steady_ms=22.0, private_mb=900.0, peak_mb=1300.0)
"""A transformer on two cores: without prepacking, with, and as plain ONNX Runtime loads it."""

eighths = st.integers(1, 8_000).map(lambda number: number / 8)
"""Milliseconds that floating-point numbers add and multiply without rounding."""

points = st.lists(st.tuples(eighths, eighths), min_size=1, max_size=30).map(
    lambda pairs: [Point(number, first, steady) for number, (first, steady) in enumerate(pairs)]
)


def trial(*figures: Figures, failure: str | None = None) -> Trial:
    return Trial(0, "screening", DEFAULT, figures, (ANCHOR,) * len(figures), failure)


def cost_at(runs: int, point: Point) -> float:
    return point.first_result_ms + (runs - 1) * point.steady_ms


def dominates(one: Point, other: Point) -> bool:
    return one.first_result_ms <= other.first_result_ms and one.steady_ms <= other.steady_ms


def test_a_session_costs_its_load_its_first_run_and_the_others() -> None:
    assert Objective(1).cost_ms(SOON) == 86.0
    assert Objective(2).cost_ms(SOON) == 117.0
    assert Objective(1000).cost_ms(STEADY) == 304.0 + 999 * 22.0


def test_the_plan_that_costs_least_depends_on_the_number_of_runs() -> None:
    assert Objective(10).cost_ms(SOON) < Objective(10).cost_ms(STEADY)
    assert Objective(100).cost_ms(SOON) > Objective(100).cost_ms(STEADY)


def test_a_limit_that_is_just_kept_is_kept() -> None:
    objective = Objective(1, max_private_mb=300.0, max_steady_ratio=31 / 22)
    assert objective.violations([SOON], [ANCHOR]) == ()
    assert objective.is_allowed(trial(SOON))


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (Objective(1, max_private_mb=299.0), "private memory 300 MB, allowed 299"),
        (Objective(1, max_steady_ratio=1.4), "steady run 1.409 × default, allowed 1.4"),
        (Objective(1, max_gpu_mb=1000.0), "GPU memory 1200 MB, allowed 1000"),
    ],
)
def test_a_limit_that_is_exceeded_is_told_with_both_figures(objective: Objective, told: str) -> None:
    figures = dataclasses.replace(SOON, gpu_mb=1200.0)
    assert objective.violations([figures], [ANCHOR]) == (told,)
    assert not objective.is_allowed(trial(figures))


def test_limits_are_held_against_medians_so_that_one_process_decides_nothing() -> None:
    swollen = dataclasses.replace(SOON, private_mb=9000.0)
    assert Objective(1, max_private_mb=300.0).violations([SOON, swollen, SOON], [ANCHOR] * 3) == ()


def test_a_plan_without_a_gpu_takes_no_gpu_memory() -> None:
    assert Objective(1, max_gpu_mb=1.0).violations([SOON], [ANCHOR]) == ()


def test_a_score_is_the_median_of_the_rounds() -> None:
    double = dataclasses.replace(ANCHOR, init_ms=1203.0)
    assert Objective(1).score(trial(ANCHOR, ANCHOR, double)) == 1.0
    assert Objective(1).score(trial(double)) == 2.0


def test_a_trial_that_failed_has_an_infinite_score_and_is_not_allowed() -> None:
    for failed in (trial(failure="SIGSEGV"), trial(SOON, failure="SIGSEGV"), trial()):
        assert Objective(1).score(failed) == float("inf")
        assert not Objective(1).is_allowed(failed)


@given(points)
def test_no_plan_of_a_front_is_beaten_in_both_figures_and_every_other_is(plans: list[Point]) -> None:
    front = find_front(plans)
    assert not any(dominates(one, other) and not dominates(other, one) for one in plans for other in front)
    assert all(any(dominates(one, other) for one in front) for other in plans)


@given(points)
def test_a_front_goes_from_the_soonest_first_result_to_the_shortest_run(plans: list[Point]) -> None:
    front = find_front(plans)
    assert front[0].first_result_ms == min(plan.first_result_ms for plan in plans)
    assert front[-1].steady_ms == min(plan.steady_ms for plan in plans)
    firsts, steadies = [p.first_result_ms for p in front], [p.steady_ms for p in front]
    assert firsts == sorted(set(firsts))
    assert steadies == sorted(set(steadies), reverse=True)


@given(points)
def test_at_a_break_even_the_steadier_plan_costs_less_and_one_run_sooner_it_does_not(
    plans: list[Point],
) -> None:
    front = find_front(plans)
    by_number = {plan.number: plan for plan in plans}
    found = find_break_evens(front)
    assert len(found) == len(front) - 1
    for one in found:
        sooner, steadier = by_number[one.sooner], by_number[one.steadier]
        assert cost_at(one.runs, steadier) < cost_at(one.runs, sooner)
        assert cost_at(one.runs - 1, steadier) >= cost_at(one.runs - 1, sooner)


def test_prepacking_a_transformer_is_worth_it_from_the_twenty_sixth_run_on() -> None:
    front = find_front([Point(1, 86.0, 31.0), Point(2, 304.0, 22.0), Point(0, 623.0, 22.0)])
    assert [point.number for point in front] == [1, 2]
    (one,) = find_break_evens(front)
    assert (one.sooner, one.steadier, one.runs) == (1, 2, 26)


def test_a_plan_alone_has_no_break_even() -> None:
    assert find_break_evens(find_front([Point(0, 1.0, 1.0)])) == ()


def test_a_point_is_the_medians_of_a_trial() -> None:
    assert points_of([trial(SOON, SOON, STEADY)]) == (Point(0, 86.0, 31.0),)


def test_every_figure_is_summarised_and_gpu_memory_only_where_there_is_some() -> None:
    values = summary_values([SOON, dataclasses.replace(SOON, gpu_mb=5.0)], Objective(2))
    assert values["cost_ms"] == [117.0, 117.0]
    assert values["first_result_ms"] == [86.0, 86.0]
    assert values["gpu_mb"] == [5.0]
