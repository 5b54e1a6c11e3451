"""The check on real sessions of a small model: its structure, and what cannot vary."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ortprep.bundle.codec import encode
from ortprep.doctor.doctor_model import DoctorModel
from ortprep.doctor.parallel.check import diagnose_parallel
from ortprep.doctor.parallel.session_creation import make_sessions
from ortprep.doctor.parallel.verdict import WAYS
from ortprep.errors import LoadError, LoadTimeoutError
from ortprep.runtime.loading.load_options import Deadline
from ortprep.runtime.loading.session import build_session, default_plan, device_guard
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import add_model, write_bundle

pytestmark = pytest.mark.slow


@pytest.fixture
def subject(tmp_path: Path) -> DoctorModel:
    (tmp_path / "add.onnx").write_bytes(add_model())
    write_tensors(tmp_path / "add.npz", {"x": np.ones(2, np.float32)})
    return DoctorModel("add", str(tmp_path / "add.npz"), str(tmp_path / "add.onnx"))


def test_every_way_makes_every_session_in_every_round(subject: DoctorModel) -> None:
    found = diagnose_parallel(subject, devices=["cpu"], sessions=3)
    assert (found.check, found.subject) == ("parallel", "add")
    ways = found.figures["ways"]
    assert ways["failures"] == {}
    assert set(ways["rounds"]) == set(WAYS)
    for rounds in ways["rounds"].values():
        assert len(rounds) >= 3
        for measured in rounds:
            assert len(measured["session_ms"]) == 3
            assert 0 < measured["creating_ms"] < measured["ready_ms"]
            assert 0 < measured["start_ms"] < measured["ready_ms"]
            assert max(measured["session_ms"]) <= measured["creating_ms"] * (1 + 1e-9)
    assert json.loads(json.dumps(found.figures)) == found.figures
    assert len(found.tables[0].rows) == 3


def test_what_is_measured_is_not_this_packages_own_lock(subject: DoctorModel, tmp_path: Path) -> None:
    """`build_session` has threads take turns on a device; a check of ONNX Runtime's threads must not."""
    plan = default_plan(subject.require_source())
    request = {
        "plans": [encode(plan)] * 2,
        "in_threads": True,
        "barrier": str(tmp_path),
        "participants": 1,
    }
    with device_guard(plan, Deadline(None, subject="a model")):
        with ThreadPoolExecutor() as threads, pytest.raises(LoadTimeoutError):
            threads.submit(build_session, plan, timeout_s=0.05).result()
        assert len(make_sessions(request)["ready_s"]) == 2


def test_a_model_that_cannot_be_loaded_is_an_error_that_names_it(subject: DoctorModel) -> None:
    Path(subject.require_source()).write_bytes(b"no model")
    with pytest.raises(LoadError, match=r"add\.onnx"):
        diagnose_parallel(subject, devices=["cpu"], sessions=2)


@pytest.mark.manual
def test_a_bundle_alone_is_loaded_as_jobs_load_it(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path)
    found = diagnose_parallel(DoctorModel("b", "", bundle=str(bundle)), devices=["cpu"], sessions=2)
    assert set(found.figures["ways"]["rounds"]) == set(WAYS)


def test_neither_source_nor_bundle_is_an_error(subject: DoctorModel) -> None:
    with pytest.raises(LoadError, match="no source model"):
        diagnose_parallel(DoctorModel("b", subject.sample), devices=["cpu"])
