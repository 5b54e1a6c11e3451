"""Dimensions that only say that a size is not known are independent, in specs and where shapes are bound."""

from __future__ import annotations

import onnx
import pytest

from ortprep.bundle.onnx_inputs import dimension_name, read_inputs
from ortprep.spec.models import ModelSpec
from ortprep.stages.convert.pass_records import PassRequest
from ortprep.stages.convert.shapes import bind_shapes
from ortprep.stages.core.inputs.agreement import require_fit, shape_sets
from ortprep.stages.fetch.inspection import inspect_model
from tests import builders as models
from tests.init.builders import copies

NAMELESS = ["", "?", "-1", "unk__6", "DynamicDimension.0", "p2o.DynamicDimension.0"]


def unrelated_net(written: str) -> onnx.ModelProto:
    """`left` [?, 4] and `right` [?, 4]: their sizes have nothing in common."""
    model = copies("float[n, 4] left", "float[n, 4] right")
    for item in (*model.graph.input, *model.graph.output):
        item.type.tensor_type.shape.dim[0].dim_param = written
    return model


@pytest.mark.parametrize("written", ["batch", "s0", "N", "unknown", "past + 1"])
def test_a_name_is_a_name(written):
    assert dimension_name(written) == written


@pytest.mark.parametrize("written", NAMELESS)
def test_what_says_nothing_is_no_name_and_gets_sizes_of_its_own(tmp_path, written):
    path = models.write_model(unrelated_net(written), tmp_path / "m.onnx")
    assert [item.shape for item in read_inputs(path)] == [(None, 4), (None, 4)]
    interface = inspect_model((str(path), "m")).interface
    inputs = {"left": {"shapes": [[3, 4]]}, "right": {"shapes": [[5, 4]]}}
    spec = ModelSpec.model_validate({"name": "m", "source": {"path": "m.onnx"}, "inputs": inputs})
    require_fit(spec, interface)
    assert shape_sets(spec, interface) == ({"left": (3, 4), "right": (5, 4)},)

    bound = tmp_path / "bound" / "m.onnx"
    bound.parent.mkdir()
    bind_shapes(PassRequest(name="shapes", source=path, written=bound, dimensions={"left[0]": 3}))
    assert [item.shape for item in read_inputs(bound)] == [(3, 4), (None, 4)]
