"""An input for a model of which nothing but the file is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from ortprep.bundle.loader_config import TensorSpec
from ortprep.doctor.sampling import examine_bundle, examine_source, parse_shapes, settle_shapes
from ortprep.errors import LoadError, SpecError
from ortprep.runtime.tensors.arrays import read_tensors
from tests.builders import (
    bfloat16_net,
    embedding,
    half_net,
    if_net,
    int8_net,
    optional_input,
    sequence_input,
    string_input,
    two_inputs,
    write_model,
    zero_inputs,
)
from tests.runtime.builders import write_bundle

OPEN = (TensorSpec("ids", "int64", ("batch", "length")), TensorSpec("mask", "int64", ("batch", "length")))


def test_a_size_that_is_given_once_holds_for_every_input():
    shapes, remarks = settle_shapes(OPEN, {"ids": (2, 7)})
    assert shapes == {"ids": (2, 7), "mask": (2, 7)}
    inputs = (TensorSpec("x", "float32", ()), TensorSpec("y", "float32", None))
    assert settle_shapes(inputs, {"y": (4, 2)})[0] == {"x": (), "y": (4, 2)}
    assert remarks == ()


def test_what_is_assumed_is_said_with_how_to_say_otherwise():
    shapes, remarks = settle_shapes(OPEN, {})
    assert shapes == {"ids": (1, 1), "mask": (1, 1)}
    assert remarks[0] == "ids: shape [1, 1] is assumed; --shape ids=1,1 sets another"


@pytest.mark.parametrize("wanted", [{"other": (1,)}, {"ids": (1,)}, {"ids": (1, 2, 3)}])
def test_a_shape_that_does_not_fit_is_refused(wanted):
    with pytest.raises(SpecError, match="expected"):
        settle_shapes(OPEN, wanted)
    with pytest.raises(SpecError):
        settle_shapes((TensorSpec("x", "float32", (1, 3)),), {"x": (2, 3)})


@pytest.mark.attack
def test_inputs_that_are_too_large_together_are_refused():
    """A file of 2 KB asked for 800 GiB, 8 GiB an input."""
    inputs = tuple(TensorSpec(f"x{number}", "float64", (2**27,)) for number in range(9))
    with pytest.raises(SpecError, match=r"expected up to 2\*\*30 elements, got 1207959552"):
        settle_shapes(inputs, {})


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


def test_a_model_file_gets_an_input_it_can_run(tmp_path):
    subject = examine_source(write_model(embedding(), tmp_path / "words.onnx"), tmp_path)
    arrays = read_tensors(Path(subject.sample))
    assert subject.name == "words"
    assert all(array.max() <= 1 for array in arrays.values() if array.dtype.kind == "i")
    half = examine_source(write_model(half_net(), tmp_path / "half.onnx"), tmp_path)
    assert {array.dtype for array in read_tensors(Path(half.sample)).values()} == {np.dtype("float16")}


@pytest.mark.parametrize(
    ("build", "error", "said"),
    [
        (string_input, SpecError, "strings"),
        (sequence_input, LoadError, "expected a tensor"),
        (optional_input, LoadError, "expected a tensor"),
        (None, LoadError, r"m\.onnx"),
    ],
)
def test_what_cannot_be_made_up_is_refused(tmp_path, build, error, said):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"no model" if build is None else build().SerializeToString())
    with pytest.raises(error, match=said):
        examine_source(path, tmp_path)


def test_a_bundle_is_examined_with_its_golden_sample(tmp_path):
    bundle = write_bundle(tmp_path / "linear")
    subject = examine_bundle(bundle, tmp_path)
    assert subject.source is None
    assert subject.bundle == str(bundle)
    assert read_tensors(Path(subject.sample))
    with pytest.raises(LoadError, match="no source model"):
        subject.require_source()


@pytest.mark.parametrize("build", [two_inputs, if_net, bfloat16_net, int8_net, zero_inputs])
def test_every_kind_of_input_is_made_up_as_the_model_takes_it(tmp_path, build):
    model = write_model(build(), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    arrays = read_tensors(Path(examine_source(model, tmp_path).sample))
    assert list(arrays) == [one.name for one in session.get_inputs()]


def test_sizes_without_a_name_are_not_the_same_size(tmp_path):
    model = two_inputs()
    for one in (*model.graph.input, *model.graph.output):
        one.type.tensor_type.shape.dim[0].dim_param = "?"
    source = write_model(model, tmp_path / "m.onnx")
    subject = examine_source(source, tmp_path, shapes={"left": (3, 4)})
    arrays = read_tensors(Path(subject.sample))
    assert [array.shape for array in arrays.values()] == [(3, 4), (1, 4)]
