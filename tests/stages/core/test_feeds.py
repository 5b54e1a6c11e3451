"""Seeded inputs respect what the model and the spec say, and stay the same for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.model_facts import ModelInterface
from ortprep.errors import SpecError
from ortprep.runtime.tensors.element_types import dtype_name, widen
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.samples import build_feeds

FLOATS = ("float16", "float32", "float64", "bfloat16")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
SHAPE = (40, 25)


def feed(dtype, *, shape=SHAPE, bound=None, **declared):
    inputs = {"x": declared} if declared else {}
    spec = ModelSpec.model_validate({"name": "m", "source": {"path": "m.onnx"}, "inputs": inputs})
    interface = ModelInterface(
        inputs=(TensorSpec("x", dtype, tuple(None for _ in shape)),),
        outputs=(),
        index_bounds={} if bound is None else {"x": bound},
        external=False,
    )
    return build_feeds(interface, {"x": shape}, spec, seed=0)["x"]


def values_of(array):
    return list(np.unique(widen(array)).tolist())


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool", "complex64", "complex128"])
def test_every_element_type_can_be_made(dtype):
    array = feed(dtype)
    assert dtype_name(array.dtype) == dtype
    assert array.shape == SHAPE
    assert np.isfinite(widen(array)).all()
    assert len(values_of(array)) > 1


def test_a_range_as_wide_as_the_type_stays_finite():
    assert np.isfinite(feed("float64", range=[-1.7e308, 1.7e308])).all()
    assert np.isfinite(feed("float16", range=[-1e9, 1e9])).all()


def test_a_range_of_integers_includes_both_ends():
    assert values_of(feed("int64", range=[-1, 2])) == [-1, 0, 1, 2]
    assert values_of(feed("uint8", range=[3.5, 5.9])) == [4, 5]
    assert values_of(feed("int32", range=[7, 7])) == [7]


def test_indices_stay_below_the_size_of_what_they_index():
    assert values_of(feed("int64", bound=3)) == [0, 1, 2]
    assert values_of(feed("int64", bound=3, range=[1, 100])) == [1, 2]
    assert values_of(feed("uint8", bound=2)) == [0, 1]
    assert values_of(feed("int32", bound=1)) == [0]


def test_small_integers_take_every_value_and_others_are_0_or_1():
    assert values_of(feed("uint8", shape=(100, 100))) == list(range(256))
    assert values_of(feed("int8", shape=(100, 100))) == list(range(-128, 128))
    assert values_of(feed("int64")) == [0, 1]


def test_declared_values_are_the_only_ones():
    assert values_of(feed("string", values=["a", "bé"])) == ["a", "bé"]
    assert values_of(feed("float32", values=[0.5, 2])) == [0.5, 2.0]
    assert values_of(feed("bfloat16", values=[0.5, 2])) == [0.5, 2.0]
    assert values_of(feed("bool", values=[True])) == [True]
    assert values_of(feed("int64", values=[2**62])) == [2**62]


def test_strings_are_never_made_up():
    with pytest.raises(SpecError, match="'x'") as caught:
        feed("string")
    assert "values" in str(caught.value.hint)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16", "uint8"])
def test_scalars_and_empty_arrays_can_be_made(dtype, shape):
    assert feed(dtype, shape=shape).shape == shape


@given(others=st.lists(st.text(min_size=1).filter(lambda name: name != "x"), max_size=4, unique=True))
def test_adding_an_input_changes_no_other(others):
    spec = ModelSpec.model_validate({"name": "m", "source": {"path": "m.onnx"}})

    def build(*names):
        inputs = tuple(TensorSpec(name, "float32", (None,)) for name in names)
        interface = ModelInterface(inputs, (), {}, external=False)
        return build_feeds(interface, dict.fromkeys(names, (5,)), spec, seed=7)

    alone, together = build("x"), build(*others, "x")
    assert np.array_equal(alone["x"], together["x"])
    assert list(together) == [*others, "x"]
    drawn = {array.tobytes() for array in together.values()}
    assert len(drawn) == len(together)


def test_a_seed_gives_the_same_numbers_on_every_machine():
    # Written down once: a change here would make every golden sample another.
    assert feed("int64", shape=(8,), range=[0, 999]).tolist() == [576, 508, 224, 84, 408, 924, 87, 743]
