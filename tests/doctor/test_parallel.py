"""Workers of a model at once: what made-up figures show, and what fails on real sessions.

Results on real models are in tests/cli/test_doctor_command.py.
"""

from __future__ import annotations

import inspect
import os
import re
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.doctor import parallel, worker_group
from ortprep.doctor.diagnosis import Severity
from ortprep.doctor.doctor_model import DoctorModel, plan_on
from ortprep.doctor.parallel import (
    MIN_GAIN,
    WorkerSetup,
    build_table,
    diagnose_parallel,
    find_in,
    plan_workers,
)
from ortprep.doctor.worker_group import GroupFigures, start_group
from ortprep.errors import ChildError, LoadError
from ortprep.measuring.comparison import InterleavedRuns
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import add_model, sample, weights_of, write_linear

SETUPS = DEFAULT, LIMITED = WorkerSetup(4, None), WorkerSetup(4, 1)
NOISE = (0.99, 1.0, 1.01)


def figures(run_ms):
    return tuple(GroupFigures(200 * n, 100, run_ms * n, 4e3 / (run_ms * n)) for n in NOISE)


def serving(default_ms, limited_ms):
    measured = zip(SETUPS, (default_ms, limited_ms), strict=True)
    return InterleavedRuns({str(setup): figures(run_ms) for setup, run_ms in measured}, {})


def failing(setup):
    return InterleavedRuns({}, {str(setup): "out of memory"})


def found_in(runs):
    return {one.code: one for one in find_in(runs, SETUPS)}


class RunCase(NamedTuple):
    """Measurements, and a finding that must be among what is said of them."""

    code: str
    severity: Severity
    runs: InterleavedRuns


CASES = (
    RunCase("workers-failed", "problem", failing(LIMITED)),
    RunCase("default-threads-cost", "advice", serving(20, 10)),
    RunCase("default-threads-as-good", "ok", serving(10, 10)),
)


def test_every_code_has_a_case():
    written = re.findall(r'Finding\(\s*"([a-z-]+)"', inspect.getsource(parallel))
    assert set(written) == {case.code for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.severity}")
def test_every_case_is_found_with_its_severity_and_a_step_to_take(case):
    found = find_in(case.runs, SETUPS)
    assert (case.code, case.severity) in {(finding.code, finding.severity) for finding in found}
    assert all(finding.hint or finding.severity in ("ok", "note") for finding in found)
    assert len(build_table(case.runs, SETUPS).rows) == len(case.runs.rounds)


@given(st.floats(0.01, 1e4), st.floats(0, 0.95), st.sampled_from(range(2)))
def test_less_than_what_is_worth_a_change_is_never_advised(run_ms, share, slowest):
    runs_ms = [run_ms] * 2
    runs_ms[slowest] *= 1 + share * MIN_GAIN
    assert "default-threads-cost" not in found_in(serving(*runs_ms))


def test_workers_are_tried_with_the_threads_that_load_sets_beside_the_default():
    setups = plan_workers((1, 2, 4))
    assert {setup.workers for setup in setups if setup.threads is None} == {1, 2, 4}
    assert all(setup.threads >= 1 for setup in setups if setup.threads is not None)
    assert len({str(setup) for setup in setups}) == len(setups)


# -- real sessions


@pytest.fixture
def add(tmp_path):
    (tmp_path / "add.onnx").write_bytes(add_model())
    write_tensors(tmp_path / "add.npz", {"x": np.ones(2, np.float32)})
    return DoctorModel("add", str(tmp_path / "add.npz"), tmp_path / "add.onnx")


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_or_run_is_an_error_that_names_it(add, tmp_path):
    model, _ = write_linear(tmp_path / "linear.onnx", weights_of(0))
    write_tensors(tmp_path / "linear.npz", {"x": sample()})
    linear = DoctorModel("linear", str(tmp_path / "linear.npz"), model)
    with pytest.raises(LoadError, match="cannot run"):
        diagnose_parallel(DoctorModel("wrong", linear.sample, add.path))
    model.write_bytes(b"no model")
    with pytest.raises(LoadError, match=r"linear\.onnx"):
        diagnose_parallel(linear, seconds=0.06)


def test_a_worker_that_fails_does_not_leave_the_others_waiting(add, monkeypatch, tmp_path):
    plan = plan_on(str(add.path), "cpu")
    figures = start_group((plan, add.sample, 2, 0.02))
    assert figures.runs_per_s > 0
    assert figures.ready_ms > 0
    build, first = worker_group.build_session, tmp_path / "first"

    def build_one(plan):
        try:
            first.touch(exist_ok=False)
        except FileExistsError:
            raise LoadError("out of memory") from None
        return build(plan)

    monkeypatch.setattr(worker_group, "build_session", build_one)
    with pytest.raises(LoadError, match="out of memory"):
        start_group((plan, add.sample, 2, 0.02))
    monkeypatch.setattr(worker_group, "build_session", lambda _: os.kill(os.getpid(), 9))
    with pytest.raises(ChildError, match="a worker died"):
        start_group((plan, add.sample, 2, 0.02))
