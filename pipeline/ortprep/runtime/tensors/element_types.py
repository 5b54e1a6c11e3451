"""Element types of arrays: numpy's own, and bfloat16, which numpy lacks, as ordinary numpy arrays.

The dtype of an array of bfloat16 is `BFLOAT16`, of one integer field; its bits are `array["bfloat16"]`. So it
travels with the array through `.npy` files, slices and memory maps, cannot be mistaken for integers, and
needs no other package. Inputs and outputs of float8 and of 4 and 2 bits are refused where signatures are read
(`ortprep.bundle.loader_config.find_unusable`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ortprep.errors import PipelineError

Array: TypeAlias = NDArray[Any]
"""An array of any shape and type."""

BFLOAT16: np.dtype[Any] = np.dtype([("bfloat16", "<u2")])
"""The dtype that stands for bfloat16."""

MAX_EMPTY_ELEMENTS = 2**25
"""Largest product of the sizes beside a 0; an empty batch of RGB images of 4K has 24.9 million."""


def is_bounded_shape(shape: Sequence[int]) -> bool:
    """Returns whether the data of a tensor, or `MAX_EMPTY_ELEMENTS`, bounds every size of its shape.

    An empty tensor takes no bytes, whatever its other sizes are, but a graph may allocate by them (`Range`,
    `ConstantOfShape`). So their product is bounded, and with it each of them.
    """
    return 0 not in shape or math.prod(size for size in shape if size) <= MAX_EMPTY_ELEMENTS


def is_valid_bool(array: Array) -> bool:
    """Returns whether all bytes of an array of booleans are 0 or 1; an array of another type is valid.

    Operators of ONNX Runtime trust them: `Compress` sums bytes to know how many elements it keeps, so larger
    ones make its output longer than what it writes, and the rest is memory that others used before.
    """
    return array.dtype != np.bool_ or bool(array.view(np.uint8).max(initial=0) <= 1)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype of arrays of an ONNX element type; strings are numpy's `U`.

    Raises:
        PipelineError: No array can hold the type.
    """
    if name == "bfloat16":
        return BFLOAT16
    if name == "string":
        return np.dtype(np.str_)
    with suppress(TypeError):
        dtype = np.dtype({"float": "float32", "double": "float64"}.get(name, name))
        if dtype.kind in "biufc":  # other packages add names
            return dtype
    raise PipelineError(f"unknown element type: {name}")


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns the ONNX element type of an array's dtype: `float32`, `bfloat16`, `string`, …."""
    if dtype == BFLOAT16:
        return "bfloat16"
    return "string" if dtype.kind == "U" else dtype.name


def widen(array: Array) -> Array:
    """Returns the values in the widest type of their kind.

    Returns:
        The same shape as float64, complex128, int64 or uint64; bool and strings as they are.
    """
    # Casting a signalling NaN makes it a quiet one, which numpy warns about and nobody here minds.
    with np.errstate(invalid="ignore"):
        if array.dtype == BFLOAT16:
            bits = array["bfloat16"].astype(np.uint32) << np.uint32(16)
            return bits.view(np.float32).astype(np.float64)
        wide = {"f": np.float64, "c": np.complex128, "i": np.int64, "u": np.uint64}.get(array.dtype.kind)
        return array if wide is None else array.astype(wide)


def to_bfloat16(values: Array) -> Array:
    """Returns `values` rounded to the nearest bfloat16.

    Args:
        values: Finite numbers, any shape; those beyond the type's range become its largest.
    """
    limit = 3.3895313892515355e38
    bits = np.clip(values.astype(np.float64).reshape(-1), -limit, limit).astype(np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    return rounded.astype("<u2").view(BFLOAT16).reshape(values.shape)
