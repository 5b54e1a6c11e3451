"""Seeded values for one input of a model. Pure.

Where neither a range nor values are given, they are

- for floats and complex numbers: standard normal;
- for integers that index a table of the model: uniform over its rows;
- for integers of 8 bits, which hold pixels and quantised values: uniform over all values;
- for other integers, which are mostly masks, positions and lengths: 0 or 1;
- for booleans: either.

Strings have no sensible default.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ortprep.bundle.loader_config import TensorSpec
from ortprep.errors import SpecError
from ortprep.quoting import quoted
from ortprep.runtime.tensors.element_types import BFLOAT16, Array, numpy_dtype, to_bfloat16

Span: TypeAlias = tuple[float, float]
"""Lowest and highest value."""


def generator(seed: int, name: str) -> np.random.Generator:
    """Returns the generator of one input: it depends on the seed and the input's name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def draw_feed(
    tensor: TensorSpec,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    *,
    span: Span | None = None,
    values: Sequence[str | int | float | bool] | None = None,
    bound: int | None = None,
) -> Array:
    """Makes one array that respects its element type, range or values, and index bound (exclusive).

    Raises:
        SpecError: The input holds strings and there are no values to choose from.
    """
    dtype = numpy_dtype(tensor.dtype)
    if values is not None:
        chosen: Array = np.array(values)[rng.integers(0, len(values), shape)]
    elif dtype.kind == "U":
        raise SpecError(
            f"cannot make up strings for input {tensor.name!r}\n  expected values to choose from, got none",
            hint=f"add to the spec: inputs: {{{quoted(tensor.name)}: {{values: [some, words]}}}}",
        )
    elif dtype.kind == "b":
        chosen = rng.integers(0, 2, shape)
    elif dtype.kind in "iu":
        low, high = _integer_range(dtype, span=span, bound=bound)
        widest = np.uint64 if dtype.kind == "u" else np.int64
        chosen = rng.integers(low, high, shape, dtype=widest, endpoint=True)
    else:
        chosen = _draw_numbers(rng, shape, dtype, span)
    return to_bfloat16(np.asarray(chosen)) if dtype == BFLOAT16 else np.asarray(chosen).astype(dtype)


def _integer_range(dtype: np.dtype[Any], *, span: Span | None, bound: int | None) -> tuple[int, int]:
    """Returns the lowest and highest value, both included."""
    lowest, highest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if span is not None:
        low, high = math.ceil(span[0]), math.floor(span[1])
    elif bound is not None:
        low, high = 0, bound - 1
    elif dtype.itemsize == 1:
        low, high = lowest, highest
    else:
        low, high = 0, 1
    if bound is not None:
        high = min(high, bound - 1)
    high = max(min(high, highest), lowest)
    return min(max(low, lowest), high), high


def _draw_numbers(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], span: Span | None
) -> Array:
    """Draws numbers between two bounds, or of the standard normal distribution where there are none."""
    if span is not None:
        low, high = span
        if dtype.kind == "f":
            limit = float(np.finfo(dtype).max)
            low, high = max(low, -limit), min(high, limit)
        # Not rng.uniform: the width of the range may be more than a float64 holds.
        weight = rng.random(shape)
        return np.asarray(low * (1 - weight) + high * weight)
    if dtype.kind == "c":
        return np.asarray(rng.standard_normal(shape) + 1j * rng.standard_normal(shape))
    return np.asarray(rng.standard_normal(shape))
