"""Laws of the runtime, for arrays, files and shapes that nobody thought of."""

import tempfile
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ortprep.bundle.loader_config import Tolerance
from ortprep.errors import BundleError
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
