"""Which variant takes a batch: laws of `choose_bucket`, for any bundle and any shapes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.loader_config import (
    FileEntry,
    Golden,
    LoaderConfig,
    Requirements,
    TensorSpec,
    Tolerance,
    Variant,
    VersionRange,
)
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.runtime.loading.buckets import choose_bucket

Shape = tuple[int | str | None, ...] | None
Shapes = Mapping[str, tuple[int, ...]]

INPUTS = (TensorSpec("ids", "int64", ("batch", "length")), TensorSpec("x", "float32", ("batch", None, 3)))
DIMENSIONS = ("batch", "length", "x[1]")
SIZES = st.integers(1, 3)
BINDINGS = st.dictionaries(st.sampled_from(DIMENSIONS), SIZES, min_size=1)


def variant(
    name: str,
    binding: Mapping[str, int] | None = None,
    *,
    bucket: bool = True,
    target: str = "cpu",
    precision: str = "fp32",
) -> Variant:
    return Variant(
        name=name,
        target=target,
        model="m.onnx",
        files=(),
        session_options=SessionOptionsRecord("ORT_DISABLE_ALL"),
        providers=(),
        requirements=Requirements(VersionRange("1.23"), ()),
        precision=precision,
        binding=binding or {},
        bucket=bucket,
    )


GENERAL = variant("cpu", bucket=False)


def config_of(*buckets: Variant, inputs: tuple[TensorSpec, ...] = INPUTS) -> LoaderConfig:
    golden = Golden(FileEntry("golden.npz", 0, "sha256:" + "0" * 64), Tolerance(0, 0))
    return LoaderConfig("1.2", "m", inputs, (), golden, (GENERAL, *buckets))


def shapes_of(batch: int, length: int, rows: int) -> Shapes:
    return {"ids": (batch, length), "x": (batch, rows, 3)}


def taken(config: LoaderConfig, shapes: Shapes, general: Variant = GENERAL) -> str | None:
    found = choose_bucket(config, general, shapes=shapes)
    return None if found is None else found.name


@given(BINDINGS, SIZES, SIZES, SIZES)
def test_a_bucket_takes_the_batches_that_have_all_its_sizes_and_no_other(binding, batch, length, rows):
    sizes = {"batch": batch, "length": length, "x[1]": rows}
    fits = all(sizes[name] == size for name, size in binding.items())
    config = config_of(variant("bucket", binding))
    assert taken(config, shapes_of(batch, length, rows)) == ("bucket" if fits else None)


@given(st.lists(BINDINGS, max_size=5), SIZES, SIZES, SIZES)
def test_of_several_that_fit_the_one_that_binds_most_is_taken(bindings, batch, length, rows):
    buckets = [variant(str(number), binding) for number, binding in enumerate(bindings)]
    sizes = {"batch": batch, "length": length, "x[1]": rows}
    fitting = [one for one in buckets if one.binding.items() <= sizes.items()]
    found = choose_bucket(config_of(*buckets), GENERAL, shapes=shapes_of(batch, length, rows))
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting
        assert len(found.binding) == max(len(one.binding) for one in fitting)


@given(BINDINGS, st.permutations(["ids", "x"]))
def test_the_order_in_which_inputs_are_given_does_not_matter(binding, order):
    shapes = shapes_of(1, 2, 3)
    config = config_of(variant("bucket", binding))
    assert taken(config, {name: shapes[name] for name in order}) == taken(config, shapes)


@pytest.mark.parametrize(
    "shapes",
    [
        {"ids": (1, 2), "x": (2, 2, 3)},
        {"ids": (2, 2), "x": (1, 2, 3)},
        {"ids": (1, 2), "x": (1, 2, 4)},
        {"ids": (1, 2), "x": (1, 2)},
        {"ids": (1, 2, 3), "x": (1, 2, 3)},
        {"ids": (1, 2)},
        {"ids": (1, 2), "x": (1, 2, 3), "more": (1,)},
        {},
    ],
    ids=str,
)
def test_what_no_variant_takes_is_left_to_the_general_one(shapes):
    assert taken(config_of(variant("bucket", {"batch": 1})), shapes) is None


def test_the_answer_keeps_its_target_and_precision_whatever_the_batch():
    kinds = list(itertools.product(("cpu", "cuda"), ("fp32", "int8")))
    buckets = [variant(f"{t}-{p}", {"batch": 1}, target=t, precision=p) for t, p in kinds]
    for target, precision in kinds:
        general = variant("general", bucket=False, target=target, precision=precision)
        assert taken(config_of(*buckets), shapes_of(1, 2, 3), general) == f"{target}-{precision}"


def test_a_size_that_no_input_shows_is_never_taken_for_granted():
    assert taken(config_of(variant("bucket", {"batch": 1, "past": 1})), shapes_of(1, 2, 3)) is None


def test_a_bucket_that_was_asked_for_by_name_takes_everything_itself():
    named, other = variant("cpu-batch1", {"batch": 1}), variant("cpu-batch2", {"batch": 2})
    assert taken(config_of(named, other), shapes_of(2, 2, 3), named) is None


@pytest.mark.parametrize(("shape", "fits"), [((4, 2), True), ((4,), True), ((3, 2), False), ((), False)])
def test_an_input_of_unknown_rank_is_judged_by_the_axes_it_has(shape, fits):
    config = config_of(variant("bucket", {"x[0]": 4}), inputs=(TensorSpec("x", "float32", None),))
    assert taken(config, {"x": shape}) == ("bucket" if fits else None)


def test_sizes_that_the_general_variant_is_bound_to_hold_for_its_buckets_too():
    general = variant("cpu", {"length": 2}, bucket=False)
    config = config_of(variant("bucket", {"batch": 1}))
    assert taken(config, shapes_of(1, 2, 3), general) == "bucket"
    assert taken(config, shapes_of(1, 3, 3), general) is None
