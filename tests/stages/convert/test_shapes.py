"""Binding symbolic dimensions: every size is in the written model, its answers stay, nothing else moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from ortprep.bundle.onnx_inputs import read_inputs
from ortprep.errors import StageError
from ortprep.stages.convert.pass_records import PassRequest
from ortprep.stages.convert.shapes import bind_shapes
from tests import builders as models


def bind(source: Path, sizes: dict[str, int]) -> tuple[dict[str, Any], Path]:
    """Returns the shapes of the bound model's inputs, and the model."""
    written = source.parent / "bound" / "model.onnx"
    written.parent.mkdir()
    bind_shapes(PassRequest(name="shapes", source=source, written=written, dimensions=sizes))
    return {spec.name: spec.shape for spec in read_inputs(written)}, written


def answer(path: Path, feeds: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def shape(value: onnx.ValueInfoProto) -> list[int | str | None]:
    dims = value.type.tensor_type.shape.dim
    return [dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else None) for dim in dims]


def test_a_bound_name_has_its_size_in_every_input_and_output(tmp_path):
    source = models.write_model(models.two_inputs(), tmp_path / "model.onnx")
    inputs, written = bind(source, {"batch": 3})
    graph = onnx.load(written).graph
    assert inputs == {"left": (3, 4), "right": (3, 4)}
    assert [shape(output) for output in graph.output] == [[3, 5]]


def test_an_axis_without_a_name_is_called_by_input_and_number(tmp_path):
    source = models.write_model(models.conv_net(batch=None), tmp_path / "model.onnx")
    inputs, written = bind(source, {"image[0]": 4})
    assert inputs == {"image": (4, 3, 16, 16)}
    assert shape(onnx.load(written).graph.output[0]) == [4, 10]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"bach": 3}, "expected one of batch"),
        ({"left[1]": 4}, "expected one of batch"),
        ({"left[9]": 4}, "expected one of batch"),
        ({"batch": 2, "right[0]": 3}, "expected 2, as for batch, got 3"),
    ],
)
def test_what_cannot_be_bound_is_refused_and_nothing_is_written(tmp_path, sizes, said):
    source = models.write_model(models.two_inputs(), tmp_path / "model.onnx")
    with pytest.raises(StageError, match=said) as error:
        bind(source, sizes)
    assert error.value.hint is not None
    assert "shapes: {batch: " in error.value.hint
    assert list((tmp_path / "bound").iterdir()) == []


def test_notes_of_sequences_stay_what_they_are(tmp_path):
    model = models.conv_net()
    note = onnx.helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    model.graph.value_info.append(note)
    _, written = bind(models.write_model(model, tmp_path / "model.onnx"), {"batch": 2})
    assert list(onnx.load(written).graph.value_info) == [note]


def test_external_weights_are_linked_and_not_read(tmp_path):
    source = models.write_external_model(models.matmul_net(), tmp_path / "model.onnx", location="data/w.bin")
    _, written = bind(source, {"batch": 2})
    assert (written.parent / "data/w.bin").samefile(tmp_path / "data/w.bin")
    assert written.stat().st_size < 2048
    feeds = {"x": np.ones((2, 64), np.float32)}
    np.testing.assert_array_equal(answer(written, feeds), answer(source, feeds))


def test_external_weights_of_branches_are_copied_since_links_to_them_are_refused(tmp_path):
    source = models.write_external_model(models.if_net(size=4096), tmp_path / "model.onnx")
    _, written = bind(source, {"batch": 1})
    assert not (written.parent / "weights.bin").samefile(tmp_path / "weights.bin")
    feeds = {"x": np.ones((1, 4096), np.float32)}
    np.testing.assert_array_equal(answer(written, feeds), answer(source, feeds))
