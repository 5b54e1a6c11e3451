"""Element types of ONNX that numpy lacks (bfloat16, float8, 4 and 2 bits), as ordinary numpy arrays.

Such an array has a structured dtype of one integer field that is named after the type: bfloat16 is
`np.dtype([("bfloat16", "<u2")])`, and its bits are `array["bfloat16"]`. So the type travels with the array
through `.npy` files, slices and memory maps, cannot be mistaken for integers, and needs no other package.
Types of less than 8 bits take one byte per element here; only ONNX Runtime's buffers pack them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ortprep.bundle.onnx_wire import ELEMENT_TYPE_NAMES
from ortprep.errors import PipelineError

Array: TypeAlias = NDArray[Any]
"""An array of any shape and type."""

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


@dataclass(frozen=True)
class _MiniFloat:
    """Layout of a float of at most 8 bits; `nan` and `inf` are bit patterns without sign."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan: tuple[int, ...] = ()
    inf: tuple[int, ...] = ()
    negative_zero_is_nan: bool = False


@dataclass(frozen=True)
class ElementType:
    """An element type that numpy lacks.

    Attributes:
        name: As ONNX Runtime spells it in `tensor(NAME)`.
        storage: Numpy's name of the integer that holds one element.
        bits: Size of one element in ONNX Runtime's buffers.
        layout: How to read it as a float; None for bfloat16 and integers.
    """

    name: str
    storage: str
    bits: int
    layout: _MiniFloat | None = None

    @property
    def code(self) -> int:
        """Its number in `onnx.TensorProto.DataType`."""
        return next(code for code, name in ELEMENT_TYPE_NAMES.items() if name == self.name)

    @property
    def is_integer(self) -> bool:
        """Whether its elements are integers."""
        return self.layout is None and self.name != "bfloat16"

    @property
    def is_signed(self) -> bool:
        """Whether it has values below zero."""
        return not self.name.startswith("uint")

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest and highest integer of an integer type."""
        lowest = -(1 << (self.bits - 1)) if self.is_signed else 0
        return lowest, lowest + (1 << self.bits) - 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype that stands for it."""
        return np.dtype([(self.name, self.storage)])


_TYPES = (
    ElementType("bfloat16", "<u2", 16),
    ElementType("float8e4m3fn", "|u1", 8, _MiniFloat(4, 3, 7, nan=(0x7F,))),
    ElementType("float8e4m3fnuz", "|u1", 8, _MiniFloat(4, 3, 8, negative_zero_is_nan=True)),
    ElementType("float8e5m2", "|u1", 8, _MiniFloat(5, 2, 15, nan=(0x7D, 0x7E, 0x7F), inf=(0x7C,))),
    ElementType("float8e5m2fnuz", "|u1", 8, _MiniFloat(5, 2, 16, negative_zero_is_nan=True)),
    ElementType("uint4", "|u1", 4),
    ElementType("int4", "|i1", 4),
    ElementType("float4e2m1", "|u1", 4, _MiniFloat(2, 1, 1)),
    ElementType("uint2", "|u1", 2),
    ElementType("int2", "|i1", 2),
)

ELEMENT_TYPES: Mapping[str, ElementType] = {kind.name: kind for kind in _TYPES}
"""The types by name."""


def find_element_type(name: str) -> ElementType | None:
    """Returns the type of that name, underscores aside (`float8_e4m3fn`), or None if numpy has it itself."""
    return ELEMENT_TYPES.get(name.replace("_", ""))


def element_type_of(dtype: np.dtype[Any]) -> ElementType | None:
    """Returns the type that an array's dtype stands for, or None if it is numpy's own."""
    if dtype.names is None or len(dtype.names) != 1:
        return None
    kind = ELEMENT_TYPES.get(dtype.names[0])
    return kind if kind is not None and kind.dtype == dtype else None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype of arrays of an ONNX element type; strings are numpy's `U`.

    Raises:
        PipelineError: No array can hold the type.
    """
    kind = find_element_type(name)
    if kind is not None:
        return kind.dtype
    if name == "string":
        return np.dtype(np.str_)
    try:
        return np.dtype({"float": "float32", "double": "float64"}.get(name, name))
    except TypeError as error:
        raise PipelineError(f"unknown element type: {name}") from error


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns the ONNX element type of an array's dtype: `float32`, `bfloat16`, `string`, …."""
    kind = element_type_of(dtype)
    if kind is not None:
        return kind.name
    return "string" if dtype.kind == "U" else dtype.name


def widen(array: Array) -> Array:
    """Returns the values in the widest type of their kind.

    Returns:
        The same shape as float64, complex128, int64 or uint64; bool and strings as they are.
    """
    kind = element_type_of(array.dtype)
    # Casting a signalling NaN makes it a quiet one, which numpy warns about and nobody here minds.
    with np.errstate(invalid="ignore"):
        if kind is not None:
            return _widen_bits(array[kind.name], kind)
        wide = {"f": np.float64, "c": np.complex128, "i": np.int64, "u": np.uint64}.get(array.dtype.kind)
        return array if wide is None else array.astype(wide)


def _widen_bits(bits: Array, kind: ElementType) -> Array:
    if kind.name == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if kind.layout is None:
        return bits.astype(np.int64 if kind.is_signed else np.uint64)
    values = _values(kind.layout)
    return values[bits.astype(np.intp) % len(values)]


@functools.cache
def _values(layout: _MiniFloat) -> NDArray[np.float64]:
    """Returns the value of every bit pattern."""
    half = 1 << (layout.exponent_bits + layout.mantissa_bits)
    bits = np.arange(half)
    exponent = bits >> layout.mantissa_bits
    mantissa = bits & ((1 << layout.mantissa_bits) - 1)
    # Without an exponent the leading one of the mantissa is absent, and the scale that of exponent 1.
    significand = mantissa + np.where(exponent > 0, 1 << layout.mantissa_bits, 0)
    scale = np.maximum(exponent, 1) - layout.bias - layout.mantissa_bits
    positive = np.ldexp(significand.astype(np.float64), scale)
    positive[list(layout.nan)] = np.nan
    positive[list(layout.inf)] = np.inf
    values = np.concatenate([positive, -positive])
    if layout.negative_zero_is_nan:
        values[half] = np.nan
    return values


def narrow(values: Array, kind: ElementType) -> Array:
    """Returns `values` rounded to the nearest element of a type numpy lacks.

    Args:
        values: Finite numbers, any shape; those beyond the type's range become its largest.
        kind: The type.

    Returns:
        An array of `kind.dtype` and the same shape.
    """
    flat = values.astype(np.float64).reshape(-1)
    if kind.name == "bfloat16":
        bits = _round_to_bfloat16(flat)
    elif kind.layout is None:
        bits = np.clip(np.rint(flat), *kind.limits)
    else:
        bits = _nearest(flat, _values(kind.layout))
    return bits.astype(kind.storage).view(kind.dtype).reshape(values.shape)


def _round_to_bfloat16(flat: NDArray[np.float64]) -> Array:
    limit = 3.3895313892515355e38
    bits = np.clip(flat, -limit, limit).astype(np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)


def _nearest(flat: NDArray[np.float64], values: NDArray[np.float64]) -> Array:
    codes = np.flatnonzero(np.isfinite(values))
    codes = codes[np.argsort(values[codes], kind="stable")]
    middles = (values[codes][1:] + values[codes][:-1]) / 2
    return codes[np.searchsorted(middles, flat)]
