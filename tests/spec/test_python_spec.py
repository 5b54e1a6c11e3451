"""A spec in Python says what the same file says, with the same messages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ortprep.errors import SpecError
from ortprep.spec.models import InputSpec, TuneSpec, resolved_spec
from ortprep.spec.python_spec import Spec, override, write_spec
from ortprep.spec.reading import read_spec

INPUTS = {"x": {"shapes": [[1, 64]], "range": [0, 1]}}


@pytest.mark.parametrize(
    "sections",
    [
        {"inputs": INPUTS, "tune": {"max_trials": 0}},
        {"inputs": {"x": InputSpec(shapes=((1, 64),), range=(0, 1))}, "tune": TuneSpec(max_trials=0)},
        {"inputs": {"x": {"shapes": np.array([[1, 64]]), "range": (np.float32(0), np.int64(1))}}},
    ],
)
def test_sections_are_mappings_models_or_numbers_of_numpy(tmp_path, sections):
    sections = {"tune": {"max_trials": 0}, **sections}
    path = tmp_path / "net.yaml"
    said = {"name": "net", "source": {"path": "net.onnx"}, "inputs": INPUTS, "tune": {"max_trials": 0}}
    path.write_text(json.dumps(said))
    assert resolved_spec(Spec("net.onnx", **sections)) == resolved_spec(read_spec(path))


def test_relative_paths_start_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = Spec(Path("models/net.onnx"))
    monkeypatch.chdir("/")
    assert (spec.folder, spec.source.path) == (tmp_path, "models/net.onnx")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("models/My net (2).onnx", "My-net-2"),
        ("ünï.onnx", "uni"),
        ("https://host/a/net.onnx?token=1", "net"),
        ("hf://org/bert-base/onnx/model.onnx@main", "bert-base"),
        ("hf://org/bert-base@v1/onnx/model_int8.onnx", "bert-base-model_int8"),
        ({"demo": "resnet50"}, "resnet50"),
        ("...onnx", "model"),
    ],
)
def test_a_bundle_is_named_after_its_source(source, name):
    assert Spec(source).name == name


def test_every_problem_is_told_as_of_a_file():
    with pytest.raises(SpecError) as caught:
        Spec("net.onnx", tune={"max_trial": 3}, measure={"rounds": "5"})
    assert "bad spec (2 problems)\n  measure.rounds: expected" in caught.value.message
    assert "tune.max_trial: unknown key; did you mean 'max_trials'?" in caught.value.message
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    "source", ["", "hf://nothing", {"path": "a.onnx", "demo": "b"}, {}, 3, None, b"net.onnx"]
)
def test_a_wrong_source_is_a_wrong_spec(source):
    with pytest.raises(SpecError, match="source"):
        Spec(source)


def test_keys_are_merged_over_a_spec():
    spec = Spec("net.onnx", inputs=INPUTS, tune={"max_trials": 5, "rounds": 9})
    merged = override(spec, {"name": "other", "tune": {"max_trials": 0}})
    assert (merged.name, merged.tune.max_trials, merged.tune.rounds) == ("other", 0, 9)
    assert (merged.inputs, merged.folder) == (spec.inputs, spec.folder)
    with pytest.raises(SpecError, match="unknown key"):
        override(spec, {"tunes": {}})


def test_a_spec_that_is_written_elsewhere_says_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = Spec("models/net.onnx", inputs=INPUTS, samples="data/*.npz", tune={"max_trials": 0})
    write_spec(spec, Path("configs/net.yaml"))
    read = read_spec(tmp_path / "configs/net.yaml")
    assert (read.source.path, read.samples) == ("../models/net.onnx", "../data/*.npz")
    same = {"samples": None}
    assert resolved_spec(read) | same == resolved_spec(spec) | same
