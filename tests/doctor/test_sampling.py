"""The input of a model of which nothing but the file is known."""

import numpy as np
import onnxruntime
import pytest

from ortprep.cli.machine_commands import parse_shapes
from ortprep.errors import SourceError, SpecError
from ortprep.init.input_search import ObservedInput
from ortprep.init.trial_run import write_sample
from ortprep.runtime.tensors.arrays import read_tensors
from tests.builders import (
    bfloat16_net,
    half_net,
    if_net,
    optional_input,
    sequence_input,
    string_input,
    two_inputs,
    write_model,
    zero_inputs,
)


def test_shapes_are_parsed():
    assert parse_shapes(["x=1,3,224,224", "a=b=7", "scalar="]) == {
        "x": (1, 3, 224, 224),
        "a=b": (7,),
        "scalar": (),
    }


@pytest.mark.parametrize(
    "text", ["", "x", "=1", "x=1,", "x=-1", "x=1,a", "x=" + "1" * 20, "x=" + "1," * 40 + "1"]
)
def test_a_text_that_is_no_shape_is_refused(text):
    with pytest.raises(SpecError, match="expected NAME=1,3,224,224"):
        parse_shapes([text])


@pytest.mark.parametrize("build", [two_inputs, if_net, bfloat16_net, half_net, string_input, zero_inputs])
def test_every_kind_of_input_is_made_up_as_the_model_takes_it(tmp_path, build):
    model = write_model(build(), tmp_path / "m.onnx")
    write_sample(model, tmp_path / "sample.npz", {})
    arrays = read_tensors(tmp_path / "sample.npz")
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    assert list(arrays) == [one.name for one in session.get_inputs()]
    if build is half_net:
        assert {array.dtype for array in arrays.values()} == {np.dtype("float16")}


@pytest.mark.parametrize("build", [sequence_input, optional_input, None])
def test_what_cannot_be_made_up_is_refused(tmp_path, build):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"no model" if build is None else build().SerializeToString())
    with pytest.raises(SourceError, match=r"m\.onnx"):
        write_sample(path, tmp_path / "sample.npz", {})


@pytest.mark.parametrize(
    ("shapes", "said"), [({"other": (1,)}, "unknown input"), ({"left": (3, 4, 5)}, "found no input")]
)
def test_a_shape_that_does_not_fit_is_refused(tmp_path, shapes, said):
    model = write_model(two_inputs(), tmp_path / "m.onnx")
    known = {name: ObservedInput((shape,)) for name, shape in shapes.items()}
    with pytest.raises(SpecError, match=said):
        write_sample(model, tmp_path / "sample.npz", known)


@pytest.mark.attack
def test_inputs_that_are_too_large_together_are_refused(tmp_path):
    """A file of 2 KB asked for 800 GiB, 8 GiB an input."""
    model = two_inputs()
    for one in model.graph.input:
        one.type.tensor_type.shape.dim[0].dim_value = 2**40
    with pytest.raises((SourceError, SpecError)):
        write_sample(write_model(model, tmp_path / "m.onnx"), tmp_path / "sample.npz", {})
