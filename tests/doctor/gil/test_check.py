"""The check on real sessions; what it says of a version is in tests/compat/test_gil_by_version.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortprep.bundle.codec import encode
from ortprep.doctor.doctor_model import plan_on
from ortprep.doctor.gil import gil_monitor
from ortprep.doctor.gil.check import diagnose_gil
from ortprep.doctor.gil.heavy_model import LAYERS, WEIGHTS_BYTES, write_heavy_model
from ortprep.errors import LoadError
from ortprep.runtime.tensors.arrays import write_tensors
from tests.runtime.builders import add_model


def test_a_small_model_gives_figures_and_no_verdict(tmp_path: Path) -> None:
    model, sample = tmp_path / "add.onnx", tmp_path / "add.npz"
    model.write_bytes(add_model())
    write_tensors(sample, {"x": np.ones(2, np.float32)})
    found = diagnose_gil(model=str(model), sample=str(sample))
    assert found.check == "gil"
    assert found.subject == str(model)
    assert set(found.figures["verdicts"]) >= {"run"}
    assert set(found.figures["verdicts"].values()) == {"unclear"}
    assert [finding.code for finding in found.findings] == ["gil-unclear"]
    assert all(len(calls) == 3 for calls in found.figures["phases"].values())
    assert json.loads(json.dumps(found.figures)) == found.figures


def test_without_a_sample_runs_are_left_out(tmp_path: Path) -> None:
    model = tmp_path / "add.onnx"
    model.write_bytes(add_model())
    assert "run" not in diagnose_gil(model=str(model), sample=None).figures["phases"]


def test_a_model_that_cannot_be_loaded_is_an_error_that_names_it(tmp_path: Path) -> None:
    model = tmp_path / "bad.onnx"
    model.write_bytes(b"no model")
    with pytest.raises(LoadError, match=r"bad\.onnx"):
        diagnose_gil(model=str(model), sample=None)


@pytest.mark.parametrize("missing", ["_load", "_initialise"])
def test_where_a_version_has_no_two_steps_creation_is_watched_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def refuse(*arguments: object) -> object:
        raise TypeError("incompatible function arguments")

    (tmp_path / "add.onnx").write_bytes(add_model())
    monkeypatch.setattr(gil_monitor, missing, refuse)
    plan = plan_on(str(tmp_path / "add.onnx"), "cpu")
    answer = gil_monitor.watch({"plan": encode(plan), "sample": None})
    assert set(answer["phases"]) == {"create"}
    assert len(answer["phases"]["create"]) == 3


def test_the_model_that_is_made_is_valid(tmp_path: Path) -> None:
    model, sample = write_heavy_model(tmp_path)
    onnx.checker.check_model(str(model), full_check=False)
    assert len(onnx.load(str(model)).graph.initializer) == LAYERS
    assert model.stat().st_size > WEIGHTS_BYTES
    assert list(np.load(sample)) == ["x0"]
