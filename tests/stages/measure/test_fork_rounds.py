"""What a forked worker is compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ortprep.children.probe import ProbeRequest, ProbeResult
from ortprep.errors import ChildError
from ortprep.spec.models import MeasureSpec, TuneSpec
from ortprep.stages.measure import stage
from tests.stages.measure.test_measure import SPEC, build_context, measured, said

RESULT = ProbeResult(
    ready_ms=100.0, init_ms=10.0, first_ms=5.0, steady_ms=1.0, private_mb=9.0, peak_mb=9.0, runs=5
)


class Machine:
    """A machine that is twice as slow from a certain point on, and on which every plan takes as long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, slow_from: int) -> None:
        self.measured: list[str] = []
        self.fails_from, self._slow_from = 10**6, slow_from
        monkeypatch.setattr(stage, "measure_plan", self.measure)
        monkeypatch.setattr(stage.StagedBundles, "stage", lambda *_, **__: Path("staged"))

    def measure(self, request: ProbeRequest, **_: object) -> ProbeResult:
        what = "fork" if request.forked else "plan"
        self.measured.append(what)
        if what == "plan" and len(self.measured) > self.fails_from:
            raise ChildError("the child died")
        return replace(RESULT, steady_ms=2.0 if len(self.measured) > self._slow_from else 1.0)


@pytest.fixture
def context(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    measure = MeasureSpec(rounds=3, cold_rounds=0, steady_s=0.01)
    return build_context(tmp_path, spec=SPEC.model_copy(update={"measure": measure}))


ROUNDS = 3 * (1 + 3 + 3)
"""Measurements of three plans: once uncounted, and two times three rounds, since none is faster."""


def test_a_machine_that_became_slower_is_no_fault_of_the_fork(context, monkeypatch):
    machine = Machine(monkeypatch, slow_from=ROUNDS)
    _, result = measured(context)
    assert sorted(machine.measured[ROUNDS:]) == ["fork"] * 6 + ["plan"] * 6
    assert not [line for line in said(context) if "a forked worker" in line]
    steady = {plan.plan: plan.steady_ms.median for plan in result.measurements[0].plans}
    assert (steady["default"], steady["forked"]) == (1.0, 2.0)


def test_plans_that_are_tuned_for_forks_are_compared_as_forks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tune = TuneSpec(max_trials=0, fork=True)
    context = build_context(tmp_path, spec=SPEC.model_copy(update={"tune": tune}))
    _, result = measured(context)
    assert result.decision.reason.startswith("as forked workers, on one thread: ")
    figures = {record.cache: {plan.plan: plan for plan in record.plans} for record in result.measurements}
    assert list(figures) == ["forked", "warm", "cold"]
    assert list(figures["forked"]) == ["default", "prepared", "portable"]
    for name, fork in figures["forked"].items():
        assert 0 < fork.ready_ms.median < figures["warm"][name].ready_ms.median / 2
        assert 0 < fork.private_mb.median < figures["warm"][name].private_mb.median / 2


def test_a_default_that_fails_beside_forks_was_measured_all_the_same(context, monkeypatch):
    machine = Machine(monkeypatch, slow_from=ROUNDS)
    machine.fails_from = ROUNDS
    _, result = measured(context)
    (warm,) = result.measurements
    assert [plan.plan for plan in warm.plans] == ["default", "prepared", "portable", "forked"]
    assert not warm.skipped
