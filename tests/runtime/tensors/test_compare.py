"""What counts as an equal output, and what is told about one that is not."""

import numpy as np
import pytest

from ortprep.bundle.loader_config import Tolerance
from ortprep.runtime.tensors.compare import compare_output
from ortprep.runtime.tensors.element_types import BFLOAT16, to_bfloat16

pytestmark = pytest.mark.runtime

EXACT = Tolerance(0, 0)
NAN, INF = float("nan"), float("inf")


def compare(expected, got, tolerance=EXACT, **options):
    return compare_output(np.asarray(expected), np.asarray(got), tolerance, name="y", **options)


@pytest.mark.parametrize(
    ("expected", "got", "reason"),
    [
        (np.array([1], np.float32), np.array([1], np.float64), "element type: expected float32, got float64"),
        (np.array([1], np.int8), np.array([1], np.uint8), "element type: expected int8, got uint8"),
        (np.array([1], np.uint16), np.array([1], np.uint16).view(BFLOAT16), "got bfloat16"),
        (np.array(["1"]), np.array([1]), "expected string"),
        (np.zeros((2, 3)), np.zeros((3, 2)), "shape: expected [2, 3], got [3, 2]"),
        (np.zeros((0, 3)), np.zeros((0, 2)), "shape"),
        (np.zeros(()), np.zeros((1,)), "shape: expected [], got [1]"),
    ],
)
def test_another_type_or_shape_is_never_equal(expected, got, reason):
    result = compare(expected, got, Tolerance(INF, INF))
    assert not result.ok
    assert reason in result.reason
    assert result.ratio == INF


@pytest.mark.parametrize(
    ("expected", "got", "tolerance", "ok"),
    [
        # Equal even without a tolerance.
        (np.zeros((0, 3)), np.zeros((0, 3)), EXACT, True),
        (np.array([], dtype=np.str_), np.array([], dtype="U7"), EXACT, True),
        ([NAN, INF, -INF, -0.0], [NAN, INF, -INF, 0.0], EXACT, True),
        (np.array(["a", "bc"]), np.array(["a", "bc"], dtype="U9"), EXACT, True),
        (3.5, 3.5, EXACT, True),
        ([1 + 2j, complex(NAN, 1)], [1 + 2j, complex(NAN, 2)], EXACT, True),
        ([True, False], [True, False], EXACT, True),
        (np.array([2**64 - 1], np.uint64), np.array([2**64 - 1], np.uint64), EXACT, True),
        # The bound itself is allowed.
        ([0.0], [0.5], Tolerance(0, 0.5), True),
        ([0.0], [np.nextafter(0.5, 1)], Tolerance(0, 0.5), False),
        # Integers are exact whatever the relative tolerance, and may differ by an absolute one.
        ([50_000, 7], [50_001, 7], Tolerance(0.5, 1e-5), False),
        (np.array([3, 255], np.uint8), np.array([4, 254], np.uint8), Tolerance(0, 1), True),
        (np.array([0], np.uint8), np.array([255], np.uint8), Tolerance(0, 1), False),
        (np.array([-128], np.int8), np.array([127], np.int8), Tolerance(0, 1), False),
        # Integers beyond the precision of floats.
        ([2**62], [2**62 + 1], EXACT, False),
        ([-(2**63)], [2**63 - 1], EXACT, False),
        (np.array([2**64 - 1], np.uint64), np.array([0], np.uint64), Tolerance(0, 2.0**63), False),
        # Booleans and strings know no tolerance.
        ([True], [False], Tolerance(9, 9), False),
        ([["a", "b"]], [["a", "c"]], Tolerance(9, 9), False),
        # Complex numbers are compared by their distance.
        ([1000 + 0j], [1000 + 1j], Tolerance(1e-3, 0), True),
        ([1000 + 0j], [1000 + 1.1j], Tolerance(1e-3, 0), False),
        (np.array([1], np.complex64), np.array([complex(1, NAN)], np.complex64), Tolerance(1, 1), False),
        # Differences that overflow are wrong, and no warning.
        ([1.7e308], [-1.7e308], Tolerance(0.5, 0), False),
        (np.array([3e38], np.float32), np.array([-3e38], np.float32), Tolerance(1, 0), False),
        # The bits of bfloat16 are compared by their values.
        (to_bfloat16(np.array([1, 4, 2])), to_bfloat16(np.array([1, 5, 2])), Tolerance(0, 1), True),
        (to_bfloat16(np.array([1, 4, 2])), to_bfloat16(np.array([1, 5, 2])), EXACT, False),
    ],
    ids=str,
)
def test_border_values(expected, got, tolerance, ok):
    result = compare(expected, got, tolerance)
    assert (result.ok, result.ratio <= 1) == (ok, ok)
    if tolerance == EXACT and ok:
        assert result.ratio == 0


@pytest.mark.parametrize(
    ("expected", "got", "reason"),
    [
        ([0.0, 1.0, NAN], [0.0, 1.0, 2.0], "NaN mask differs"),
        ([0.0, 1.0, 2.0], [9.0, 1.0, NAN], "NaN mask differs"),
        ([0.0, 1.0, INF], [0.0, 1.0, -INF], "infinity differs"),
        ([0.0, 1.0, INF], [0.0, 1.0, 1e308], "infinity differs"),
        ([0.0, 1.0, 2.0], [5.0, 1.0, INF], "infinity differs"),
        ([0.0, 1.0, INF], [0.0, 1.0, NAN], "NaN mask differs"),
    ],
)
@pytest.mark.parametrize("tolerance", [EXACT, Tolerance(1, 1e6)])
def test_nan_and_infinity_are_never_within_a_tolerance(expected, got, reason, tolerance):
    result = compare(expected, got, tolerance)
    assert (result.ok, result.reason, result.worst_index, result.ratio) == (False, reason, (2,), INF)


def test_memory_maps_of_any_layout_are_compared_without_being_held(tmp_path):
    values = np.random.default_rng(0).standard_normal((300, 1000))
    np.save(tmp_path / "c.npy", values)
    np.save(tmp_path / "f.npy", np.asfortranarray(values))
    left, right = (np.load(tmp_path / name, mmap_mode="r") for name in ("c.npy", "f.npy"))
    assert compare(left, right, block_elements=1000).ok
    changed = values.copy()
    changed[123, 456] += 1
    assert compare(left, changed).worst_index == (123, 456)
    assert compare(left[::2, ::3], values[::2, ::3]).ok


@pytest.mark.parametrize(
    ("wrong", "by", "ok"),
    [(1, 0.01, True), (3, 0.01, True), (4, 0.01, False), (1, 0.03, False), (1, np.nan, False)],
)
def test_few_elements_may_be_off_as_far_as_rounding_moves_them(wrong, by, ok):
    expected = np.linspace(-1, 1, 1000, dtype=np.float32)
    got = expected.copy()
    got[10 : 10 + wrong] += by
    found = compare_output(expected, got, Tolerance(1e-3, 1e-5, 0.02, 0.003), name="y")
    assert (found.ok, found.ratio > 1) == (ok, True)
    assert not compare_output(expected, got, Tolerance(1e-3, 1e-5), name="y").ok
    integers = Tolerance(0, 0, 100, 1)
    assert not compare_output(np.array([1, 2]), np.array([1, 3]), integers, name="y").ok
