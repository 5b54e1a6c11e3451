from __future__ import annotations

import itertools
from collections import Counter

import pytest

from pipeline.errors import ChildError
from pipeline.measuring.rounds import (
    Outcome,
    figures_of,
    join_outcomes,
    order_of_round,
    run_rounds,
)
from pipeline.runtime.probe import ProbeResult
from pipeline.stages.measure.decision import samples_of

PLANS = ("default", "recipe", "prepared", "portable")


def result(init_ms: float, *, gpu_mb: float | None = None) -> ProbeResult:
    return ProbeResult(
        ready_ms=init_ms + 150.0,
        import_ms=120.0,
        init_ms=init_ms,
        first_ms=10.0,
        steady_ms=8.0,
        steady_p25_ms=7.9,
        steady_p75_ms=8.2,
        steady_p99_ms=9.0,
        runs=50,
        private_mb=64.0,
        peak_mb=200.0,
        gpu_mb=gpu_mb,
        onnxruntime="1.31.1",
    )


@pytest.mark.parametrize("count", range(1, 8))
def test_every_round_runs_every_plan_once(count: int) -> None:
    plans = [f"plan{i}" for i in range(count)]
    for index in range(3 * count):
        assert sorted(order_of_round(plans, index)) == plans


@pytest.mark.parametrize("count", range(2, 8))
def test_every_plan_follows_every_other_equally_often(count: int) -> None:
    plans = [f"plan{i}" for i in range(count)]
    rounds = count if count % 2 == 0 else 2 * count
    neighbours: Counter[tuple[str, str]] = Counter()
    for index in range(rounds):
        order = order_of_round(plans, index)
        neighbours.update(itertools.pairwise(order))
    assert len(neighbours) == count * (count - 1)
    assert len(set(neighbours.values())) == 1


def test_plans_are_interleaved() -> None:
    measured: list[str] = []

    def measure(plan: str) -> ProbeResult:
        measured.append(plan)
        return result(1.0)

    run_rounds(PLANS, rounds=5, measure=measure)
    for start in range(0, 20, 4):
        assert sorted(measured[start : start + 4]) == sorted(PLANS)


def test_rounds_that_go_on_take_the_orders_that_come_next() -> None:
    measured: list[str] = []

    def measure(plan: str) -> ProbeResult:
        measured.append(plan)
        return result(1.0)

    run_rounds(PLANS, rounds=3, measure=measure)
    run_rounds(PLANS, rounds=3, measure=measure, first=3)
    assert measured == [plan for index in range(6) for plan in order_of_round(PLANS, index)]


def test_a_plan_that_fails_once_leaves_the_comparison_and_the_others_go_on() -> None:
    attempts: Counter[str] = Counter()

    def measure(plan: str) -> ProbeResult:
        attempts[plan] += 1
        if plan == "recipe" and attempts[plan] == 2:
            raise ChildError("child process died: SIGSEGV")
        return result(float(attempts[plan]))

    outcome = run_rounds(PLANS, rounds=4, measure=measure)
    assert outcome.failures == {"recipe": "child process died: SIGSEGV"}
    assert list(outcome.results) == ["default", "prepared", "portable"]
    assert all(len(results) == 4 for results in outcome.results.values())
    assert attempts["recipe"] == 2


def test_rounds_add_up_for_plans_that_never_failed() -> None:
    one, two = (result(1.0),), (result(2.0),)
    joined = join_outcomes(
        Outcome({"default": one, "prepared": one, "portable": one}, {"recipe": "early"}),
        Outcome({"default": two, "prepared": two}, {"recipe": "again", "portable": "late"}),
    )
    assert joined.results == {"default": one + two, "prepared": one + two}
    assert joined.failures == {"recipe": "early", "portable": "late"}


def test_time_to_first_result_is_summed_within_a_process() -> None:
    figures = figures_of("prepared", [result(1.0), result(5.0), result(9.0)])
    assert (figures.init_ms.median, figures.first_result_ms.median) == (5.0, 15.0)
    assert [one.first_result_ms for one in samples_of([result(1.0), result(5.0)])] == [11.0, 15.0]


def test_gpu_memory_is_told_only_where_every_process_told_it() -> None:
    assert figures_of("p", [result(1.0, gpu_mb=512.0), result(1.0)]).gpu_mb is None
    told = figures_of("p", [result(1.0, gpu_mb=512.0), result(1.0, gpu_mb=514.0)]).gpu_mb
    assert told is not None
    assert told.median == 513.0
