"""The two half precisions, and what becomes of a float32 number in each."""

from __future__ import annotations

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
    """

    name: str
    code: int
    kind: str
    numpy_type: Any
    largest: float
    smallest: float


FLOAT16 = HalfType("float16", TensorProto.FLOAT16, "tensor(float16)", np.float16, 65504.0, 5.96e-08)
BFLOAT16 = HalfType(
    "bfloat16",
    TensorProto.BFLOAT16,
    "tensor(bfloat16)",
    ml_dtypes.bfloat16,
    (2 - 2**-7) * 2.0**127,
    0.0,
)


def round_to_half(values: NDArray[np.float32], half: HalfType) -> NDArray[Any]:
    """Rounds float32 numbers to nearest even, as `onnxruntime.transformers.float16` does.

    Infinities and NaN stay what they are. Finite numbers beyond the largest one become it, so that none
    turns infinite; positive ones too small become the smallest one, so that no divisor turns 0.
    """
    limit, smallest = np.float32(half.largest), np.float32(half.smallest)
    values = np.where(np.isfinite(values), np.clip(values, -limit, limit), values)
    is_tiny = (values != 0) & (np.abs(values) < smallest)
    return np.where(is_tiny, np.copysign(smallest, values), values).astype(half.numpy_type)


def largest_beyond(values: NDArray[np.float32], half: HalfType) -> float:
    """Returns the largest magnitude among the finite numbers that are out of range; 0 if none is.

    float32's own largest number, and its negative, stand for "as far as it goes" (exporters mask with them):
    they become the largest of the new type and are not out of range. Nothing is out of bfloat16's, which is
    float32's but for the last rounding.
    """
    if half == BFLOAT16:
        return 0.0
    magnitude = np.abs(values)
    beyond = (magnitude > np.float32(half.largest)) & (magnitude < _FLOAT_EXTREME)
    return float(np.max(magnitude, initial=0.0, where=beyond))
