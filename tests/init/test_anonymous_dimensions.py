"""Dimensions that only say that a size is not known are independent, in specs and where shapes are bound."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from ortprep.bundle.onnx_inputs import dimension_name, read_inputs
from ortprep.spec.models import ModelSpec
from ortprep.stages.convert.requests import BindRequest
from ortprep.stages.convert.shapes import bind_shapes
from ortprep.stages.core.inputs.agreement import shape_sets
from ortprep.stages.core.inputs.spec_fit import require_fit
from ortprep.stages.fetch.inspection import inspect_model
from tests import builders as models


def unrelated_net(written: str) -> onnx.ModelProto:
    """`left` [?, 4] and `right` [?, 4], reduced to a number each: their sizes have nothing in common."""
    nodes = [
        helper.make_node("ReduceSum", ["left"], ["one"], keepdims=0, noop_with_empty_axes=0),
        helper.make_node("ReduceSum", ["right"], ["other"], keepdims=0, noop_with_empty_axes=0),
        helper.make_node("Add", ["one", "other"], ["sum"]),
    ]
    inputs = [models.value(name, TensorProto.FLOAT, [written, 4]) for name in ("left", "right")]
    return models.build_model(nodes, inputs=inputs, outputs=[models.value("sum", TensorProto.FLOAT, [])])


@pytest.mark.parametrize("written", ["", "?", "-1", "unk__6", "DynamicDimension.0", "p2o.DynamicDimension.0"])
def test_what_says_nothing_is_no_name(tmp_path: Path, written: str) -> None:
    assert dimension_name(written) is None
    path = models.write_model(unrelated_net(written), tmp_path / "m.onnx")
    assert [item.shape for item in read_inputs(path)] == [(None, 4), (None, 4)]


@pytest.mark.parametrize("written", ["batch", "s0", "N", "unknown", "past + 1"])
def test_a_name_is_a_name(written: str) -> None:
    assert dimension_name(written) == written


@pytest.mark.parametrize("written", ["?", "unk__6", "DynamicDimension.0"])
def test_a_spec_may_give_them_different_sizes(tmp_path: Path, written: str) -> None:
    path = models.write_model(unrelated_net(written), tmp_path / "m.onnx")
    interface = inspect_model((str(path), "m")).interface
    inputs = {"left": {"shapes": [[3, 4]]}, "right": {"shapes": [[5, 4]]}}
    spec = ModelSpec.model_validate({"name": "m", "source": {"path": "m.onnx"}, "inputs": inputs})
    require_fit(spec, interface)
    assert shape_sets(spec, interface) == ({"left": (3, 4), "right": (5, 4)},)


@pytest.mark.parametrize("written", ["?", "unk__6", "DynamicDimension.0"])
def test_binding_one_leaves_the_other(tmp_path: Path, written: str) -> None:
    path = models.write_model(unrelated_net(written), tmp_path / "m.onnx")
    bound = tmp_path / "bound" / "m.onnx"
    bound.parent.mkdir()
    sizes = {"left[0]": 3}
    bind_shapes(BindRequest(source=path, written=bound, dimensions=sizes))
    assert [item.shape for item in read_inputs(bound)] == [(3, 4), (None, 4)]
