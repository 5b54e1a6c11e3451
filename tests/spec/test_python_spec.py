"""A spec in Python says what the same file says, with the same messages."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ortprep.errors import SpecError
from ortprep.spec.models import resolved_spec
from ortprep.spec.reading import make_spec, override, read_spec

INPUTS = {"x": {"shapes": [[1, 64]], "range": [0, 1]}}


@pytest.mark.parametrize(
    "sections",
    [
        {"inputs": INPUTS, "tune": {"max_trials": 0}},
        {"inputs": {"x": {"shapes": np.array([[1, 64]]), "range": (np.float32(0), np.int64(1))}}},
    ],
)
def test_sections_are_mappings_with_numbers_of_python_or_numpy(tmp_path, sections):
    sections = {"tune": {"max_trials": 0}, **sections}
    path = tmp_path / "net.yaml"
    said = {"name": "net", "source": {"path": "net.onnx"}, "inputs": INPUTS, "tune": {"max_trials": 0}}
    path.write_text(json.dumps(said))
    assert resolved_spec(make_spec("net.onnx", sections=sections)) == resolved_spec(read_spec(path))


def test_relative_paths_start_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = make_spec("models/net.onnx", sections={})
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
        ("...onnx", "model"),
    ],
)
def test_a_bundle_is_named_after_its_source(source, name):
    assert make_spec(source, sections={"inputs": INPUTS}).name == name


def test_every_problem_is_told_as_of_a_file():
    with pytest.raises(SpecError) as caught:
        make_spec("net.onnx", sections={"tune": {"max_trial": 3}, "measure": {"rounds": "5"}})
    assert "bad spec (2 problems)\n  measure.rounds: expected" in caught.value.message
    assert "tune.max_trial: unknown key; did you mean 'max_trials'?" in caught.value.message
    assert caught.value.hint is not None


@pytest.mark.parametrize("source", ["", "hf://nothing"])
def test_a_wrong_source_is_a_wrong_spec(source):
    with pytest.raises(SpecError, match="source"):
        make_spec(source, sections={})


def test_keys_are_merged_over_a_spec():
    spec = make_spec("net.onnx", sections={"inputs": INPUTS, "tune": {"max_trials": 5, "rounds": 9}})
    merged = override(spec, {"name": "other", "tune": {"max_trials": 0}})
    assert (merged.name, merged.tune.max_trials, merged.tune.rounds) == ("other", 0, 9)
    assert (merged.inputs, merged.folder) == (spec.inputs, spec.folder)
    with pytest.raises(SpecError, match="unknown key"):
        override(spec, {"tunes": {}})
