"""Is an output what it should be? Two arrays and a tolerance in, the worst element out.

Both arrays may be memory maps of any size: they are read in blocks, and no temporary is larger than a few
blocks. Everything is computed in float64, or exactly for integers.

What counts as equal:

- Element type and shape must be equal; two arrays without elements are.
- NaN must stand where NaN is expected and nowhere else, an infinity where one of its sign is.
- Floats and complex numbers: `|got − expected| <= atol + rtol · |expected|`, apart from a few elements that
  rounding moved, where the tolerance has `noise`.
- Integers: `|got − expected| <= atol`. `rtol` does not apply, since an integer output is mostly an index or a
  token, where 50,001 for 50,000 is not 0.002 % off but wrong. A tolerance below 1, as the default is, so
  means exact; a quantised output that may round by one step is declared with `atol: 1`.
- Booleans and strings: exact.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ortprep.bundle.loader_config import Tolerance
from ortprep.runtime.tensors.element_types import Array, dtype_name, widen

Element: TypeAlias = float | int | bool | complex | str
"""One element, as Python has it."""

_Floats: TypeAlias = NDArray[np.float64]

BLOCK_ELEMENTS = 2**18
"""Elements compared at a time; about ten float64 temporaries of 2 MB each."""

_LARGEST = np.uint64(2**64 - 1)

_NAN, _INFINITY, _BEYOND = "NaN mask differs", "infinity differs", "outside tolerance"
_SEVERITY = {"": 0, _BEYOND: 0, _INFINITY: 1, _NAN: 2}


@dataclass(frozen=True)
class OutputComparison:
    """How one output compares with its reference.

    Attributes:
        ok: Whether it is within its tolerance.
        reason: What is wrong, in a phrase; "" if nothing is.
        max_abs: Largest absolute difference of elements that are finite on both sides.
        max_rel: Largest of these differences relative to a reference other than 0.
        largest: Largest finite magnitude of a reference of floats or complex numbers; 0 for other types.
        worst_index: Index of the first wrong NaN or infinity, else of the largest difference, counted
            in units of its tolerance; () without elements and where types or shapes differ.
        expected: The reference there; None without such an element.
        ratio: The difference there divided by its tolerance: above 1 is wrong; infinite for a wrong NaN or
            infinity, for a difference where none is tolerated, and for unequal types and shapes.
    """

    name: str
    ok: bool = True
    reason: str = ""
    count: int = 0
    wrong: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    largest: float = 0.0
    worst_index: tuple[int, ...] = ()
    expected: Element | None = None
    got: Element | None = None
    ratio: float = 0.0


def compare_output(
    expected: Array,
    got: Array,
    tolerance: Tolerance,
    *,
    name: str,
    block_elements: int = BLOCK_ELEMENTS,
) -> OutputComparison:
    """Compares one output with its reference.

    Returns:
        The comparison; unequal types and shapes are its `reason` and no error.
    """
    mismatch = _compare_form(expected, got)
    if mismatch:
        return OutputComparison(name, ok=False, reason=mismatch, count=expected.size, ratio=float("inf"))
    result = OutputComparison(name, count=expected.size)
    for start in range(0, expected.size, block_elements):
        stop = min(start + block_elements, expected.size)
        left, right = widen(read_block(expected, start, stop)), widen(read_block(got, start, stop))
        block = _compare_block(left, right, tolerance)
        if result.expected is None or _rank(block) > _rank(result):
            (worst,) = block.worst_index
            result = replace(
                result,
                reason=block.reason,
                ratio=block.ratio,
                worst_index=tuple(int(i) for i in np.unravel_index(start + worst, expected.shape)),
                expected=left[worst].item(),
                got=right[worst].item(),
            )
        result = replace(
            result,
            ok=result.ok and block.wrong == 0,
            wrong=result.wrong + block.wrong,
            max_abs=max(result.max_abs, block.max_abs),
            max_rel=max(result.max_rel, block.max_rel),
            largest=max(result.largest, block.largest),
        )
    return replace(result, ok=True) if _is_rounding(result, tolerance) else result


def _is_rounding(result: OutputComparison, tolerance: Tolerance) -> bool:
    """Returns whether what is outside of a tolerance is few elements of floats, and near enough."""
    few = max(1.0, tolerance.noise_share * result.count)
    is_finite = result.reason == _BEYOND and result.largest > 0
    return is_finite and result.max_abs <= tolerance.noise and result.wrong <= few


def _compare_form(expected: Array, got: Array) -> str:
    if dtype_name(expected.dtype) != dtype_name(got.dtype):
        return f"element type: expected {dtype_name(expected.dtype)}, got {dtype_name(got.dtype)}"
    if expected.shape != got.shape:
        return f"shape: expected {list(expected.shape)}, got {list(got.shape)}"
    return ""


def _rank(result: OutputComparison) -> tuple[int, float]:
    # A wrong NaN is reported before a wrong infinity, and that before any finite difference.
    return _SEVERITY[result.reason], result.ratio


def read_block(array: Array, start: int, stop: int) -> Array:
    """Copies elements `start` to `stop`, in C order, without touching or keeping the rest in memory."""
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
    block: Array = np.array(flat[start:stop])
    owner: object = array.base
    if isinstance(owner, mmap.mmap):
        # Pages of a mapped file count as this process's memory until they are let go.
        owner.madvise(mmap.MADV_DONTNEED)
    return block


def _compare_block(expected: Array, got: Array, tolerance: Tolerance) -> OutputComparison:
    """Compares two flat blocks of one type by what that type can differ in; elements are not filled in."""
    kind = str(expected.dtype.kind)
    if kind in "fc":
        return _compare_floats(expected, got, tolerance)
    if kind in "iu":
        return _compare_integers(expected, got, tolerance)
    differs = expected != got
    absolute, zeros = differs.astype(np.float64), np.zeros(len(expected))
    return _summarise(absolute, zeros, allowed=zeros, wrong=differs)


def _compare_floats(expected: Array, got: Array, tolerance: Tolerance) -> OutputComparison:
    """Compares floats within a tolerance; NaN and infinity must be at the same places."""
    is_nan = np.isnan(expected) | np.isnan(got)
    is_infinite = (np.isinf(expected) | np.isinf(got)) & ~is_nan
    wrong_nan = np.isnan(expected) != np.isnan(got)
    wrong_infinity = is_infinite & (expected != got)
    is_finite = ~(is_nan | is_infinite)
    left, right = np.where(is_finite, expected, 0), np.where(is_finite, got, 0)
    with np.errstate(over="ignore"):
        absolute, magnitude = np.abs(right - left), np.abs(left)
        allowed = tolerance.atol + tolerance.rtol * magnitude
    block = _summarise(absolute, magnitude, allowed=allowed, wrong=absolute > allowed)
    block = replace(block, largest=float(magnitude.max()))
    for reason, mask in ((_NAN, wrong_nan), (_INFINITY, wrong_infinity)):
        if mask.any():
            wrong = block.wrong + int(np.count_nonzero(wrong_nan | wrong_infinity))
            return replace(
                block, reason=reason, wrong=wrong, worst_index=(int(np.argmax(mask)),), ratio=float("inf")
            )
    return block


def _compare_integers(expected: Array, got: Array, tolerance: Tolerance) -> OutputComparison:
    # Subtracting the smaller from the larger never leaves the range of uint64, whatever wraps on the way.
    distance = np.where(got > expected, got - expected, expected - got).view(np.uint64)
    allowed = np.uint64(tolerance.atol) if tolerance.atol < 2.0**64 else _LARGEST
    absolute, magnitude = distance.astype(np.float64), np.abs(expected.astype(np.float64))
    scale = np.full(len(expected), tolerance.atol)
    return _summarise(absolute, magnitude, allowed=scale, wrong=distance > allowed)


def _summarise(
    absolute: _Floats, magnitude: _Floats, *, allowed: _Floats, wrong: NDArray[np.bool_]
) -> OutputComparison:
    """Finds the worst of one block's finite differences."""
    ratios = _divide(absolute, allowed)
    worst = int(np.argmax(ratios))
    count = int(np.count_nonzero(wrong))
    relative = np.where(magnitude > 0, _divide(absolute, magnitude), 0)
    return OutputComparison(
        "",
        reason=_BEYOND if count else "",
        wrong=count,
        max_abs=float(absolute.max()),
        max_rel=float(relative.max()),
        worst_index=(worst,),
        ratio=float(ratios[worst]),
    )


def _divide(difference: _Floats, allowed: _Floats) -> _Floats:
    """Returns differences in units of what is allowed: 0 for none, infinity for any where none is allowed."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ratios = np.nan_to_num(difference / allowed, nan=1.0, posinf=np.inf)
    return np.where(difference == 0, 0.0, ratios)
