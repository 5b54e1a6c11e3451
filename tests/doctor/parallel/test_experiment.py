"""The experiment on real sessions of small models: what fails, and what is not measured.

Its results on real models are in tests/cli/test_doctor_command.py.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ortprep.doctor.doctor_model import DoctorModel
from ortprep.doctor.parallel.experiment import diagnose_parallel
from ortprep.doctor.parallel.sessions import SessionsRequest, use_sessions
from ortprep.errors import LoadError, LoadTimeoutError
from ortprep.runtime.loading.load_options import Deadline
from ortprep.runtime.loading.session import build_session, default_plan, device_guard
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import add_model, sample, weights_of, write_linear

pytestmark = pytest.mark.slow

SECONDS = 0.06


@pytest.fixture
def add(tmp_path):
    (tmp_path / "add.onnx").write_bytes(add_model())
    write_tensors(tmp_path / "add.npz", {"x": np.ones(2, np.float32)})
    return DoctorModel("add", str(tmp_path / "add.npz"), str(tmp_path / "add.onnx"))


@pytest.fixture
def linear(tmp_path):
    model, _ = write_linear(tmp_path / "linear.onnx", weights_of(0))
    write_tensors(tmp_path / "linear.npz", {"x": sample()})
    return DoctorModel("linear", str(tmp_path / "linear.npz"), str(model))


def test_what_is_measured_is_not_this_packages_own_lock(add, tmp_path, monkeypatch):
    """`build_session` has threads take turns on a device; a check of ONNX Runtime's threads must not."""
    plan = default_plan(add.require_source())
    monkeypatch.setenv("ORTPREP_BARRIER", str(tmp_path))
    monkeypatch.setenv("ORTPREP_BARRIER_PARTICIPANTS", "2")
    with device_guard(plan, Deadline(None, subject="a model")):
        with ThreadPoolExecutor() as threads, pytest.raises(LoadTimeoutError):
            threads.submit(build_session, plan, timeout_s=0.05).result()
        request = SessionsRequest(((plan, add.sample),) * 2, at_once=True, window_s=0.0)
        assert len(use_sessions(request).ready_s) == 2


def test_a_model_that_cannot_be_loaded_or_run_is_an_error_that_names_it(add, linear):
    with pytest.raises(LoadError, match="cannot run"):
        diagnose_parallel([DoctorModel("wrong", linear.sample, add.source), add], devices=["cpu"])
    with pytest.raises(LoadError, match="no source model"):
        diagnose_parallel([add, DoctorModel("b", add.sample)], devices=["cpu"])
    Path(linear.require_source()).write_bytes(b"no model")
    with pytest.raises(LoadError, match=r"linear\.onnx"):
        diagnose_parallel([add, linear], devices=["cpu"], seconds=SECONDS)
    assert threading.active_count() < 20
