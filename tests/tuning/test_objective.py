from __future__ import annotations

import dataclasses

import pytest

from ortprep.children.probe import ProbeResult
from ortprep.tuning.objective import Trial
from ortprep.tuning.space import DEFAULT
from tests.tuning.builders import per_load

SOON = ProbeResult(
    ready_ms=86.0, init_ms=50.0, first_ms=36.0, steady_ms=31.0, private_mb=300.0, peak_mb=500.0
)
STEADY = ProbeResult(
    ready_ms=304.0, init_ms=270.0, first_ms=34.0, steady_ms=22.0, private_mb=700.0, peak_mb=900.0
)
BASELINE = ProbeResult(
    ready_ms=623.0, init_ms=580.0, first_ms=43.0, steady_ms=22.0, private_mb=900.0, peak_mb=1300.0
)
"""A transformer on two cores: without prepacking, with, and as plain ONNX Runtime loads it."""


def trial(*figures: ProbeResult, failure: str | None = None) -> Trial:
    return Trial(0, "screening", DEFAULT, list(figures), [BASELINE] * len(figures), failure)


def test_a_session_costs_its_load_its_first_run_and_the_others():
    assert per_load(1).cost_ms(SOON) == 86.0
    assert per_load(2).cost_ms(SOON) == 117.0
    assert per_load(1000).cost_ms(STEADY) == 304.0 + 999 * 22.0


def test_another_start_changes_when_a_plan_is_ready_and_nothing_else():
    later = SOON.with_start(SOON.start_ms + 7.0)
    assert later == dataclasses.replace(SOON, ready_ms=SOON.ready_ms + 7.0)
    assert STEADY.with_start(later.start_ms).start_ms == later.start_ms


def test_a_limit_that_is_just_kept_is_kept():
    objective = per_load(1, max_private_mb=300.0, max_steady_ratio=31 / 22)
    assert objective.violations([SOON], [BASELINE]) == ()
    assert objective.is_allowed(trial(SOON))


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (per_load(1, max_private_mb=299.0), "private memory 300 MB, allowed 299"),
        (per_load(1, max_steady_ratio=1.4), "steady run 1.409 × default, allowed 1.4"),
        (per_load(1, max_gpu_mb=1000.0), "GPU memory 1200 MB, allowed 1000"),
    ],
)
def test_a_limit_that_is_exceeded_is_told_with_both_figures(objective, told):
    figures = dataclasses.replace(SOON, gpu_mb=1200.0)
    assert objective.violations([figures], [BASELINE]) == (told,)


def test_a_trial_just_beyond_a_limit_is_measured_again_and_one_far_beyond_is_not():
    just, far = (dataclasses.replace(SOON, private_mb=size) for size in (305.0, 320.0))
    objective = per_load(1, max_private_mb=300.0)
    assert objective.is_allowed(trial(just))
    assert objective.violations([just], [BASELINE])
    assert not objective.is_allowed(trial(far))


def test_limits_are_held_against_medians_so_that_one_process_decides_nothing():
    swollen = dataclasses.replace(SOON, private_mb=9000.0)
    assert per_load(1, max_private_mb=300.0).violations([SOON, swollen, SOON], [BASELINE] * 3) == ()


def test_a_score_is_the_median_of_the_rounds():
    double = dataclasses.replace(BASELINE, ready_ms=1246.0)
    assert per_load(1).score(trial(BASELINE, BASELINE, double)) == 1.0
    assert per_load(1).score(trial(double)) == 2.0


def test_a_trial_that_failed_has_an_infinite_score_and_is_not_allowed():
    for failed in (trial(failure="SIGSEGV"), trial(SOON, failure="SIGSEGV"), trial()):
        assert per_load(1).score(failed) == float("inf")
        assert not per_load(1).is_allowed(failed)
