"""A classifier that answers with a list of maps is prepared as a copy that answers with a matrix."""

from __future__ import annotations

import os

import numpy as np
import onnxruntime
import pytest

from ortprep.errors import SourceError
from ortprep.init import find_spec_name, init_spec, refresh_tensor_copy
from ortprep.init.tensor_copy import copy_path
from ortprep.spec.reading import read_spec
from tests import builders as models
from tests.init.builders import map_classifier


def test_the_copy_answers_with_the_values_of_the_maps(tmp_path):
    path = models.write_model(map_classifier(), tmp_path / "net.onnx")
    result = init_spec(path, folder=tmp_path / "configs", may_copy=True)
    spec = read_spec(result.write())
    assert find_spec_name(path, tmp_path / "configs", or_copy=True) == spec.name == "net"
    assert "a matrix with a column per class (no, yes)" in result.text.replace("\n# ", " ")
    feed = {"x": np.array([[1.0, -2.0, 0.5, 3.0]], np.float32)}
    maps, matrix = (
        onnxruntime.InferenceSession(one).run(["probabilities"], feed)[0]
        for one in (path, copy_path(path, tmp_path / "configs"))
    )
    assert matrix.tolist() == [[maps[0]["no"], maps[0]["yes"]]]


def test_no_copy_is_made_where_the_original_is_to_be_served(tmp_path):
    path = models.write_model(map_classifier(), tmp_path / "net.onnx")
    with pytest.raises(SourceError, match="not a tensor"):
        init_spec(path, folder=tmp_path / "configs")
    assert not (tmp_path / "configs").exists()


def test_copies_of_models_of_one_name_are_apart(tmp_path):
    first, second = (tmp_path / one / "net.onnx" for one in ("a", "b"))
    assert copy_path(first, tmp_path) != copy_path(second, tmp_path)


def test_the_copy_follows_its_model(tmp_path):
    path = models.write_model(map_classifier(), tmp_path / "net.onnx")
    init_spec(path, folder=tmp_path, may_copy=True).write()
    copy = copy_path(path, tmp_path)
    before = copy.read_bytes()
    changed = map_classifier()
    changed.graph.node[0].name = "renamed"
    models.write_model(changed, path)
    os.utime(path, ns=(copy.stat().st_mtime_ns + 10**9,) * 2)
    refresh_tensor_copy(path, tmp_path)
    assert copy.read_bytes() != before
    models.write_model(models.conv_net(), path)
    os.utime(path, ns=(copy.stat().st_mtime_ns + 10**9,) * 2)
    refresh_tensor_copy(path, tmp_path)
    assert not copy.exists()
