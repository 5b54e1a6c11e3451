"""Laws of the runtime, for arrays, files and shapes that nobody thought of."""

import itertools
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

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
from ortprep.errors import BundleError
from ortprep.runtime.loading.buckets import choose_bucket
from ortprep.runtime.tensors.arrays import read_tensors, write_tensors
from ortprep.runtime.tensors.compare import compare_output
from ortprep.runtime.tensors.element_types import BFLOAT16, to_bfloat16, widen

DTYPES = st.one_of(
    hnp.floating_dtypes(sizes=(16, 32, 64), endianness="="),
    hnp.integer_dtypes(endianness="="),
    hnp.unsigned_integer_dtypes(endianness="="),
    hnp.complex_number_dtypes(sizes=(64, 128), endianness="="),
    hnp.boolean_dtypes(),
    hnp.unicode_string_dtypes(min_len=1, max_len=4, endianness="="),
    st.just(BFLOAT16),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
ARRAYS = hnp.arrays(DTYPES, SHAPES)
"""Of every type, infinities and signalling NaN among the elements."""
FLOATS = hnp.arrays(hnp.floating_dtypes(sizes=(32, 64), endianness="="), hnp.array_shapes(max_side=6))
LIMITS = st.floats(0, 1, allow_subnormal=False)
TOLERANCES = st.tuples(LIMITS, LIMITS).map(lambda limits: Tolerance(*limits))
BLOCKS = st.integers(1, 40)


def compare(expected, got, tolerance, *, block_elements=1000):
    return compare_output(expected, got, tolerance, name="y", block_elements=block_elements)


@given(array=ARRAYS, tolerance=TOLERANCES, block=BLOCKS)
def test_an_array_equals_itself(array, tolerance, block):
    result = compare(array, array.copy(), tolerance, block_elements=block)
    assert result.ok
    assert (result.reason, result.ratio, result.max_abs, result.wrong) == ("", 0, 0, 0)
    assert result.count == array.size


@given(data=st.data(), tolerance=TOLERANCES, block=BLOCKS, factor=st.floats(1.01, 1e6))
def test_one_element_past_its_tolerance_is_always_found(data, tolerance, block, factor):
    shape = data.draw(hnp.array_shapes(max_side=6))
    expected = data.draw(hnp.arrays(np.float64, shape, elements=st.floats(-1e100, 1e100)))
    index = tuple(data.draw(st.integers(0, side - 1)) for side in shape)
    got = expected.copy()
    got[index] += factor * (tolerance.atol + tolerance.rtol * abs(expected[index])) + 1e-9
    assume(abs(got[index] - expected[index]) > tolerance.atol + tolerance.rtol * abs(expected[index]))
    result = compare(expected, got, tolerance, block_elements=block)
    assert not result.ok
    assert (result.worst_index, result.wrong) == (index, 1)
    assert (result.expected, result.got) == (expected[index], got[index])
    assert result.ratio > 1


@given(data=st.data(), tolerance=TOLERANCES, block=BLOCKS)
def test_one_element_within_its_tolerance_never_fails(data, tolerance, block):
    expected = data.draw(hnp.arrays(np.float64, hnp.array_shapes(), elements=st.floats(-1e6, 1e6)))
    share = data.draw(hnp.arrays(np.float64, expected.shape, elements=st.floats(-0.99, 0.99)))
    got = expected + share * (tolerance.atol + tolerance.rtol * np.abs(expected))
    assume(np.all(np.abs(got - expected) <= tolerance.atol + tolerance.rtol * np.abs(expected)))
    assert compare(expected, got, tolerance, block_elements=block).ok


@given(data=st.data(), tolerance=TOLERANCES, block=BLOCKS)
def test_the_block_size_never_changes_the_answer(data, tolerance, block):
    expected = data.draw(ARRAYS)
    got = data.draw(hnp.arrays(expected.dtype, expected.shape))
    whole = compare(expected, got, tolerance, block_elements=10_000)
    parts = compare(expected, got, tolerance, block_elements=block)
    assert repr(whole) == repr(parts)


@given(data=st.data(), tolerance=TOLERANCES)
def test_a_nan_on_one_side_only_is_always_found_at_its_place(data, tolerance):
    array = data.draw(FLOATS.filter(lambda array: not np.isnan(array).all()))
    place = int(data.draw(st.sampled_from(np.flatnonzero(~np.isnan(array)).tolist())))
    other = array.copy()
    other.flat[place] = np.nan
    for expected, got in ((array, other), (other, array)):
        result = compare(expected, got, tolerance)
        assert (result.ok, result.reason) == (False, "NaN mask differs")
        assert np.ravel_multi_index(result.worst_index, array.shape) == place


@given(data=st.data(), tolerance=TOLERANCES)
def test_wider_tolerances_never_fail_what_narrower_ones_pass(data, tolerance):
    expected = data.draw(FLOATS)
    got = data.draw(hnp.arrays(expected.dtype, expected.shape))
    if compare(expected, got, tolerance).ok:
        for wider in (
            tolerance._replace(rtol=tolerance.rtol * 2),
            tolerance._replace(atol=tolerance.atol + 1),
        ):
            assert compare(expected, got, wider).ok


@given(data=st.data(), tolerance=TOLERANCES)
def test_a_result_is_ok_exactly_when_nothing_is_wrong_and_no_ratio_is_above_1(data, tolerance):
    expected = data.draw(ARRAYS)
    result = compare(expected, data.draw(hnp.arrays(expected.dtype, expected.shape)), tolerance)
    assert result.ok == (result.wrong == 0) == (result.reason == "") == (result.ratio <= 1)


@given(
    st.dictionaries(st.text(st.characters(exclude_characters="\0", codec="utf-8")), ARRAYS, max_size=4),
    st.sampled_from("CF"),
)
def test_what_is_written_reads_back_and_is_the_same_each_time(arrays, order):
    arrays = {name: np.copy(array, order=order) for name, array in arrays.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        write_tensors(path, arrays)
        with zipfile.ZipFile(path) as archive:
            assert {entry.date_time for entry in archive.infolist()} <= {(1980, 1, 1, 0, 0, 0)}
        read = read_tensors(path)
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        assert read[name].tobytes() == array.tobytes()


@given(data=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused_in_our_own_words(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        path.write_bytes(data)
        with pytest.raises(BundleError):
            read_tensors(path)


def test_every_bit_pattern_has_the_value_another_implementation_gives_it():
    codes = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        theirs = codes.view(ml_dtypes.bfloat16).astype(np.float64)
    assert np.array_equal(widen(codes.view(BFLOAT16)), theirs, equal_nan=True)


@given(number=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_to_bfloat16_takes_a_nearest_number(number):
    numbers = widen(np.arange(2**16, dtype=np.uint16).view(BFLOAT16))
    nearest = np.nanmin(np.abs(numbers - number))
    assert abs(float(widen(to_bfloat16(np.array(number)))) - number) == nearest


# -- which variant takes a batch: laws of `choose_bucket`, for any bundle and any shapes

Shape = tuple[int | str | None, ...] | None
Shapes = Mapping[str, tuple[int, ...]]

INPUTS = (TensorSpec("ids", "int64", ("batch", "length")), TensorSpec("x", "float32", ("batch", None, 3)))
DIMENSIONS = ("batch", "length", "x[1]")
SIZES = st.integers(1, 3)
BINDINGS = st.dictionaries(st.sampled_from(DIMENSIONS), SIZES, min_size=1)


def variant(name, binding=None, *, bucket=True, target="cpu", precision="fp32"):
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


def config_of(*buckets, inputs=INPUTS):
    golden = Golden(FileEntry("golden.npz", 0, "sha256:" + "0" * 64), Tolerance(0, 0))
    return LoaderConfig("1.2", "m", inputs, (), golden, (GENERAL, *buckets))


def shapes_of(batch, length, rows):
    return {"ids": (batch, length), "x": (batch, rows, 3)}


def taken(config, shapes, general=GENERAL):
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


UNKNOWN = (TensorSpec("x", "float32", None),)
BOUND = variant("cpu", {"length": 2}, bucket=False)


@pytest.mark.parametrize(
    ("general", "inputs", "binding", "shapes", "fits"),
    [
        (GENERAL, INPUTS, {"batch": 1}, {"ids": (1, 2), "x": (2, 2, 3)}, False),
        (GENERAL, INPUTS, {"batch": 1}, {"ids": (2, 2), "x": (1, 2, 3)}, False),
        (GENERAL, INPUTS, {"batch": 1}, {"ids": (1, 2), "x": (1, 2, 4)}, False),
        (GENERAL, INPUTS, {"batch": 1}, {"ids": (1, 2), "x": (1, 2)}, False),
        (GENERAL, INPUTS, {"batch": 1}, {"ids": (1, 2, 3), "x": (1, 2, 3)}, False),
        (GENERAL, INPUTS, {"batch": 1}, {"ids": (1, 2)}, False),
        (GENERAL, INPUTS, {"batch": 1}, {"ids": (1, 2), "x": (1, 2, 3), "more": (1,)}, False),
        (GENERAL, INPUTS, {"batch": 1}, {}, False),
        # A size that no input shows is never taken for granted.
        (GENERAL, INPUTS, {"batch": 1, "past": 1}, shapes_of(1, 2, 3), False),
        # A bucket that was requested by its name takes everything itself.
        (variant("cpu-batch2", {"batch": 2}), INPUTS, {"batch": 1}, shapes_of(1, 2, 3), False),
        # An input of unknown rank is judged by the axes it has.
        (GENERAL, UNKNOWN, {"x[0]": 4}, {"x": (4, 2)}, True),
        (GENERAL, UNKNOWN, {"x[0]": 4}, {"x": (4,)}, True),
        (GENERAL, UNKNOWN, {"x[0]": 4}, {"x": (3, 2)}, False),
        (GENERAL, UNKNOWN, {"x[0]": 4}, {"x": ()}, False),
        # Sizes that the general variant is bound to hold for its buckets too.
        (BOUND, INPUTS, {"batch": 1}, shapes_of(1, 2, 3), True),
        (BOUND, INPUTS, {"batch": 1}, shapes_of(1, 3, 3), False),
    ],
)
def test_what_no_bucket_takes_is_left_to_the_general_variant(general, inputs, binding, shapes, fits):
    config = config_of(variant("bucket", binding), inputs=inputs)
    assert taken(config, shapes, general) == ("bucket" if fits else None)


def test_the_answer_keeps_its_target_and_precision_whatever_the_batch():
    kinds = list(itertools.product(("cpu", "cuda"), ("fp32", "int8")))
    buckets = [variant(f"{t}-{p}", {"batch": 1}, target=t, precision=p) for t, p in kinds]
    for target, precision in kinds:
        general = variant("general", bucket=False, target=target, precision=precision)
        assert taken(config_of(*buckets), shapes_of(1, 2, 3), general) == f"{target}-{precision}"
