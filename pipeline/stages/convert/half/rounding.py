"""The two half precisions, and what becomes of a float32 number in each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

_FLOAT_EXTREME = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class HalfType:
    """An element type of 16 bits.

    Attributes:
        name: As specs have it.
        code: Its number in ONNX.
        kind: The type of a tensor of it, as ONNX Runtime spells it.
        numpy_type: Its numpy type.
        largest: Its largest finite number.
        smallest: Positive numbers below this become this; 0 to round them as any other.
        limit: Finite numbers beyond this are out of range.
    """

    name: str
    code: int
    kind: str
    numpy_type: Any
    largest: float
    smallest: float
    limit: float


FLOAT16 = HalfType("float16", TensorProto.FLOAT16, "tensor(float16)", np.float16, 65504.0, 5.96e-08, 65504.0)
BFLOAT16 = HalfType(
    "bfloat16",
    TensorProto.BFLOAT16,
    "tensor(bfloat16)",
    ml_dtypes.bfloat16,
    (2 - 2**-7) * 2.0**127,
    0.0,
    math.inf,
)
HALF_TYPES = {half.name: half for half in (FLOAT16, BFLOAT16)}


@dataclass(frozen=True)
class Rounding:
    """What rounding did to some numbers.

    Attributes:
        max_abs: The largest finite magnitude among those out of range; 0 if none is.
        out_of_range: How many are.
    """

    max_abs: float = 0.0
    out_of_range: int = 0

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(max(self.max_abs, other.max_abs), self.out_of_range + other.out_of_range)


def round_to_half(values: NDArray[np.float32], half: HalfType) -> tuple[NDArray[Any], Rounding]:
    """Rounds float32 numbers to nearest even, as `onnxruntime.transformers.float16` does.

    Infinities and NaN stay what they are. Finite numbers beyond the largest one become it, so that none
    turns infinite; positive ones too small become the smallest one, so that no divisor turns 0. float32's own
    largest number, and its negative, stand for "as far as it goes" (exporters mask with them): they become
    the largest of the new type and are not counted as out of range.
    """
    magnitude = np.abs(values)
    finite = np.isfinite(magnitude)
    peak = float(np.max(magnitude, initial=0.0, where=finite))
    rounding = Rounding()
    if peak > half.limit:
        beyond = finite & (magnitude > half.limit) & (magnitude < _FLOAT_EXTREME)
        largest = float(np.max(magnitude, initial=0.0, where=beyond))
        rounding = Rounding(largest, int(np.count_nonzero(beyond)))
    if peak > half.largest:
        bounded = np.clip(values, -np.float32(half.largest), np.float32(half.largest))
        values = np.where(finite, bounded, values)
    tiny = (magnitude > 0) & (magnitude < np.float32(half.smallest))
    if half.smallest and tiny.any():
        values = np.where(tiny, np.copysign(np.float32(half.smallest), values), values)
    return values.astype(half.numpy_type), rounding
