"""Seeded inputs that respect what a model and its spec say. Pure.

A seeded input, where the spec gives neither `range` nor `values`, is

- for floats and complex numbers: standard normal;
- for integers that index a table of the model (`ModelInterface.index_bounds`): uniform over its rows;
- for integers of 8 bits and fewer, which hold pixels and quantised values: uniform over all values;
- for other integers, which are mostly masks, positions and lengths: 0 or 1;
- for booleans: either.

A string input has no sensible default and needs `values`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from pipeline.bundle.loader_config import TensorSpec
from pipeline.errors import SpecError
from pipeline.runtime.element_types import (
    Array,
    ElementType,
    find_element_type,
    narrow,
    numpy_dtype,
)
from pipeline.spec.models import Input, ModelSpec
from pipeline.stages.results import ModelInterface

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""One shape per input, by name."""

Span: TypeAlias = tuple[float, float]
"""Lowest and highest value."""

_FULL_RANGE_BITS = 8


def build_feeds(interface: ModelInterface, shapes: Shapes, spec: ModelSpec, *, seed: int) -> dict[str, Array]:
    """Makes one input for a model.

    Each array depends on the seed and its own name, shape and declaration only, so that adding an input to a
    model changes no other.

    Args:
        interface: Which inputs there are.
        shapes: The shape of each.
        spec: Their declared ranges and values.
        seed: Of the generators.

    Returns:
        Arrays by input name, in the model's order.

    Raises:
        SpecError: A string input has no `values`.
    """
    return {
        tensor.name: build_feed(
            tensor,
            shapes[tensor.name],
            declared=spec.inputs.get(tensor.name),
            bound=interface.index_bounds.get(tensor.name),
            rng=_generator(seed, tensor.name),
        )
        for tensor in interface.inputs
    }


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def build_feed(
    tensor: TensorSpec,
    shape: tuple[int, ...],
    *,
    declared: Input | None,
    bound: int | None,
    rng: np.random.Generator,
) -> Array:
    """Makes one array that respects its element type, declared range or values, and index bound.

    Args:
        tensor: The input.
        shape: Of the array.
        declared: What the spec says about it.
        bound: Exclusive upper bound of an index.
        rng: Where the values come from.

    Raises:
        SpecError: The input holds strings and `values` are not declared.
    """
    kind = find_element_type(tensor.dtype)
    dtype = numpy_dtype(tensor.dtype)
    span = declared.range if declared is not None else None
    if declared is not None and declared.values is not None:
        chosen: Array = np.array(declared.values)[rng.integers(0, len(declared.values), shape)]
    elif dtype.kind == "U":
        raise SpecError(
            f"cannot make up strings for input {tensor.name!r}\n  expected values to choose from, got none",
            hint=f"add to the spec: inputs: {{{tensor.name}: {{values: [some, words]}}}}",
        )
    elif dtype.kind == "b":
        chosen = rng.integers(0, 2, shape)
    elif _is_integer(dtype, kind):
        low, high = _integer_range(dtype, kind, span=span, bound=bound)
        chosen = rng.integers(low, high, shape, dtype=_widest(dtype), endpoint=True)
    else:
        chosen = _draw_numbers(rng, shape, dtype, span)
    return narrow(np.asarray(chosen), kind) if kind is not None else np.asarray(chosen).astype(dtype)


def _is_integer(dtype: np.dtype[Any], kind: ElementType | None) -> bool:
    return dtype.kind in "iu" if kind is None else kind.is_integer


def _widest(dtype: np.dtype[Any]) -> type[np.int64] | type[np.uint64]:
    return np.uint64 if dtype.kind == "u" else np.int64


def _integer_range(
    dtype: np.dtype[Any], kind: ElementType | None, *, span: Span | None, bound: int | None
) -> tuple[int, int]:
    """Returns the lowest and highest value, both included."""
    lowest, highest = _limits(dtype, kind)
    if span is not None:
        low, high = math.ceil(span[0]), math.floor(span[1])
    elif bound is not None:
        low, high = 0, bound - 1
    elif _bits(dtype, kind) <= _FULL_RANGE_BITS:
        low, high = lowest, highest
    else:
        low, high = 0, 1
    if bound is not None:
        high = min(high, bound - 1)
    high = max(min(high, highest), lowest)
    return min(max(low, lowest), high), high


def _bits(dtype: np.dtype[Any], kind: ElementType | None) -> int:
    return dtype.itemsize * 8 if kind is None else kind.bits


def _limits(dtype: np.dtype[Any], kind: ElementType | None) -> tuple[int, int]:
    if kind is not None:
        return kind.limits
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _draw_numbers(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], span: Span | None
) -> Array:
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
