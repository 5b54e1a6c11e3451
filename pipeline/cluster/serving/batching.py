"""Rows to the batches that a model takes, and its answers back to rows. Functions of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.bundle.loader_config import LoaderConfig, TensorSpec
from pipeline.errors import InvalidRequestError, PoolError
from pipeline.runtime.element_types import Array


@dataclass(frozen=True)
class Piece:
    """Some rows that are run together.

    Attributes:
        start: The first.
        stop: The one after the last.
        size: How long the batch is that the model gets; the rest repeats the last row.
    """

    start: int
    stop: int
    size: int


def plan_pieces(count: int, sizes: Sequence[int], *, pad: bool) -> tuple[Piece, ...]:
    """Returns how rows are cut into batches.

    As many as fit go in batches of the largest size. What is left goes in one of the smallest size that takes
    all of it, unless more than half of that would be padding: then a smaller one is filled first.

    Args:
        count: How many rows.
        sizes: Lengths of batches that the model was prepared for; none for any.
        pad: Whether what is left is padded to one of them; otherwise it is run as it is.
    """
    if not sizes:
        return (Piece(0, count, count),) if count else ()
    ordered = sorted(set(sizes))
    pieces, start = [], 0
    while start < count:
        size = _next_size(count - start, ordered, pad=pad)
        stop = min(count, start + size)
        pieces.append(Piece(start, stop, size))
        start = stop
    return tuple(pieces)


def _next_size(left: int, sizes: Sequence[int], *, pad: bool) -> int:
    filled = [size for size in sizes if size <= left]
    larger = [size for size in sizes if size >= left]
    if not larger or larger[0] == left:
        return filled[-1]
    if not pad:
        return filled[-1] if filled else left
    is_wasteful = filled and larger[0] > 2 * left
    return filled[-1] if is_wasteful else larger[0]


def find_fixed_size(inputs: Sequence[TensorSpec], *, constant: Iterable[str] = ()) -> int | None:
    """Returns the length of a batch that a model fixes, None where it takes any.

    Args:
        inputs: The model's.
        constant: Names of those that are the same for every row.

    Raises:
        PoolError: An input has no axis for rows, or two fix different lengths.
    """
    sizes: dict[str, int] = {}
    for tensor in inputs:
        if tensor.name in constant or tensor.shape is None:
            continue
        if not tensor.shape:
            raise PoolError(
                f"input {tensor.name!r} has no axis for rows\n  expected one, got a scalar",
                hint=f"OnnxPredictor(…, constants={{{tensor.name!r}: value}})",
            )
        first = tensor.shape[0]
        if isinstance(first, int):
            sizes[tensor.name] = first
    if len(set(sizes.values())) > 1:
        raise PoolError(
            f"inputs fix different lengths of a batch\n  expected one, got {sizes}",
            hint="OnnxPredictor(…, constants={INPUT: value}) for what is the same for every row",
        )
    return next(iter(sizes.values()), None)


def find_bucket_sizes(config: LoaderConfig) -> tuple[int, ...]:
    """Returns the lengths of batches that the buckets of a bundle are there for, in order.

    Args:
        config: With the buckets that were opened, behind the variant for all shapes.
    """
    names = {
        tensor.shape[0] if isinstance(tensor.shape[0], str) else f"{tensor.name}[0]"
        for tensor in config.inputs
        if tensor.shape
    }
    found = {size for bucket in config.variants[1:] for name, size in bucket.binding.items() if name in names}
    return tuple(sorted(found))


def check_column(column: Any, tensor: TensorSpec, dtype: np.dtype[Any], *, name: str, model: str) -> Array:
    """Returns a column as an array that an input takes, rows along the first axis.

    Raises:
        InvalidRequestError: It is of another type, or its rows are of another shape.
    """
    array = np.asarray(column)
    expected = _describe(dtype, None if tensor.shape is None else tensor.shape[1:])
    hint = None
    if array.dtype == object:
        got = "rows of different shapes, or objects"
    elif array.dtype.newbyteorder("=") != dtype:
        got, hint = _describe(array.dtype, array.shape[1:]), f"batch[{name!r}].astype({dtype.name!r})"
    elif not _has_row_shape(array, tensor):
        got = _describe(array.dtype, array.shape[1:])
    else:
        return np.ascontiguousarray(array, dtype)
    raise InvalidRequestError(
        f"column {name!r} cannot be input {tensor.name!r} of {model}\n  expected {expected}, got {got}",
        hint=hint,
    )


def _has_row_shape(array: Array, tensor: TensorSpec) -> bool:
    if tensor.shape is None:
        return array.ndim > 0
    if array.ndim != len(tensor.shape):
        return False
    return all(
        not isinstance(size, int) or size == got
        for size, got in zip(tensor.shape[1:], array.shape[1:], strict=True)
    )


def _describe(dtype: np.dtype[Any], shape: Sequence[int | str | None] | None) -> str:
    axes = "…" if shape is None else ", ".join("?" if size is None else str(size) for size in shape)
    return f"rows of {dtype} [{axes}]"


def cut(array: Array, piece: Piece) -> Array:
    """Returns a piece of a column as a batch; the last row is repeated where it is too short."""
    rows = array[piece.start : piece.stop]
    missing = piece.size - len(rows)
    return rows if not missing else np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


def join(parts: Sequence[tuple[Piece, Array]], *, output: str, model: str) -> Array:
    """Returns the answers to some pieces as one column, without those to padding.

    Raises:
        PoolError: An answer does not have a row for every row.
    """
    for piece, part in parts:
        if part.ndim == 0 or part.shape[0] != piece.size:
            raise PoolError(
                f"output {output!r} of {model} has no row for every row\n"
                f"  expected {piece.size} along the first axis, got shape {list(part.shape)}",
                hint=f"OnnxPredictor(…, outputs=…) without {output!r}",
            )
    trimmed = [part[: piece.stop - piece.start] for piece, part in parts]
    return trimmed[0] if len(trimmed) == 1 else np.concatenate(trimmed)


def tile(sample: Mapping[str, Array], size: int) -> dict[str, Array]:
    """Returns a batch of that length, of a sample's rows in turn."""
    return {name: np.resize(array, (size, *array.shape[1:])) for name, array in sample.items()}
