"""The check on real sessions of small models: its structure, and what cannot vary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ortprep.doctor.concurrent_models.check import diagnose_concurrent
from ortprep.doctor.concurrent_models.verdict import SITUATIONS
from ortprep.doctor.doctor_model import DoctorModel
from ortprep.errors import LoadError
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import add_model, sample, weights_of, write_bundle, write_linear

pytestmark = pytest.mark.slow

SECONDS = 0.06


@pytest.fixture
def add(tmp_path: Path) -> DoctorModel:
    (tmp_path / "add.onnx").write_bytes(add_model())
    write_tensors(tmp_path / "add.npz", {"x": np.ones(2, np.float32)})
    return DoctorModel("add", str(tmp_path / "add.npz"), str(tmp_path / "add.onnx"))


@pytest.fixture
def linear(tmp_path: Path) -> DoctorModel:
    model, _ = write_linear(tmp_path / "linear.onnx", weights_of(0))
    write_tensors(tmp_path / "linear.npz", {"x": sample()})
    return DoctorModel("linear", str(tmp_path / "linear.npz"), str(model))


def test_every_model_runs_in_every_situation_of_every_round(add: DoctorModel, linear: DoctorModel) -> None:
    found = diagnose_concurrent([add, linear], devices=["cpu"], seconds=SECONDS)
    assert (found.check, found.subject) == ("concurrent", "add, linear")
    situations = found.figures["situations"]
    assert situations["failures"] == {}
    assert [model["name"] for model in found.figures["models"]] == ["add", "linear"]
    assert all(model["threads"] >= 1 for model in found.figures["models"])
    assert set(situations["rounds"]) == set(SITUATIONS)
    for rounds in situations["rounds"].values():
        assert len(rounds) == 3
        assert all(
            len(runs["run_ms"]) >= 3 and min(runs["run_ms"]) > 0 for models in rounds for runs in models
        )
    assert json.loads(json.dumps(found.figures)) == found.figures
    assert len(found.tables[0].rows) == 6


@pytest.mark.manual
def test_a_model_alone_is_run_beside_a_copy_of_itself(add: DoctorModel) -> None:
    found = diagnose_concurrent([add], devices=["cpu"], seconds=SECONDS)
    assert [model["name"] for model in found.figures["models"]] == ["add #1", "add #2"]
    assert found.subject == "add"
    for one, other in found.figures["situations"]["rounds"]["alone"]:
        assert one == other  # they are the same when alone, and measured once


def test_a_model_that_cannot_be_run_is_an_error_that_names_it(add: DoctorModel, linear: DoctorModel) -> None:
    wrong = DoctorModel("wrong", linear.sample, add.source)
    with pytest.raises(LoadError, match="cannot run"):
        diagnose_concurrent([wrong, add], devices=["cpu"], seconds=SECONDS)
    Path(linear.require_source()).write_bytes(b"no model")
    with pytest.raises(LoadError, match=r"linear\.onnx"):
        diagnose_concurrent([add, linear], devices=["cpu"], seconds=SECONDS)


@pytest.mark.manual
def test_a_bundle_alone_is_run_as_jobs_run_it(add: DoctorModel, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    write_tensors(tmp_path / "b.npz", {"x": sample()})
    prepared = DoctorModel("b", str(tmp_path / "b.npz"), bundle=str(bundle))
    found = diagnose_concurrent([add, prepared], devices=["cpu"], seconds=SECONDS)
    assert set(found.figures["situations"]["rounds"]) == set(SITUATIONS)


def test_neither_source_nor_bundle_is_an_error(add: DoctorModel) -> None:
    with pytest.raises(LoadError, match="no source model"):
        diagnose_concurrent([add, DoctorModel("b", add.sample)], devices=["cpu"])
