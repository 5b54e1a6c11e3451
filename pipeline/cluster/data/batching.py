"""Rows to the batches that a model takes, and its answers back to rows. Functions of values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortprep.bundle.loader_config import LoaderConfig, TensorSpec
from ortprep.errors import InvalidRequestError, PoolError
from ortprep.runtime.tensors.element_types import Array


@dataclass(frozen=True)
class Piece:
    """Rows from `start` to `stop`, run as a batch of `size`; the rest of it repeats the last row."""

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
                hint=f"PredictorConfig(constants={{{tensor.name!r}: value}})",
            )
        first = tensor.shape[0]
        if isinstance(first, int):
            sizes[tensor.name] = first
    if len(set(sizes.values())) > 1:
        raise PoolError(
            f"inputs fix different lengths of a batch\n  expected one, got {sizes}",
            hint="PredictorConfig(constants={INPUT: value}) for what is the same for every row",
        )
    return next(iter(sizes.values()), None)


def check_row_outputs(outputs: Iterable[TensorSpec], *, fixed: int | None, model: str) -> None:
    """Refuses outputs that have no rows by their declared shapes, however long they turn out to be.

    Raises:
        PoolError: The first axis of one is fixed at another length than the batch's, or it has none.
    """
    for tensor in outputs:
        if tensor.shape is None:
            continue
        if not tensor.shape or (isinstance(tensor.shape[0], int) and tensor.shape[0] != fixed):
            expected = "the batch's length" if fixed is None else str(fixed)
            raise _without_rows(tensor.name, model, expected, tensor.shape)


def have_named_rows(outputs: Iterable[TensorSpec], inputs: Iterable[TensorSpec]) -> bool:
    """Says whether the first axis of every output bears the name that the inputs' rows have."""
    rows = {tensor.shape[0] for tensor in inputs if tensor.shape and isinstance(tensor.shape[0], str)}
    return all(tensor.shape and tensor.shape[0] in rows for tensor in outputs)


def _without_rows(output: str, model: str, expected: str, shape: Sequence[int | str | None]) -> PoolError:
    return PoolError(
        f"output {output!r} of {model} has no row for every row\n"
        f"  expected {expected} along the first axis, got shape {list(shape)}",
        hint=f"PredictorConfig(outputs=…) without {output!r}",
    )


def find_bucket_sizes(config: LoaderConfig) -> tuple[int, ...]:
    """Returns the lengths of batches that the opened buckets of a bundle are there for, in order."""
    names = {
        tensor.shape[0] if isinstance(tensor.shape[0], str) else f"{tensor.name}[0]"
        for tensor in config.inputs
        if tensor.shape
    }
    found = {size for bucket in config.variants[1:] for name, size in bucket.binding.items() if name in names}
    return tuple(sorted(found))


def check_column(column: Any, tensor: TensorSpec, dtype: np.dtype[Any], *, name: str, model: str) -> Array:
    """Returns a column as an array that an input takes, rows along the first axis.

    One without rows has whatever type its block was given, and is taken as it is.

    Raises:
        InvalidRequestError: It is of another type, or its rows are of another shape.
    """
    array = _as_array(column)
    if array.ndim and not len(array):
        sizes = (size if isinstance(size, int) else 0 for size in (tensor.shape or ())[1:])
        return np.empty((0, *sizes), dtype)
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


def _as_array(column: Any) -> Array:
    try:
        return np.asarray(column)
    except ValueError:  # rows of different shapes
        return np.array([None])


def _has_row_shape(array: Array, tensor: TensorSpec) -> bool:
    if tensor.shape is None or not array.ndim:
        return array.ndim > 0
    return has_shape(array, dataclasses.replace(tensor, shape=(None, *tensor.shape[1:])))


def has_shape(array: Array, tensor: TensorSpec) -> bool:
    """Says whether an array has the shape of an input, as far as that is fixed."""
    if tensor.shape is None:
        return True
    if array.ndim != len(tensor.shape):
        return False
    return all(
        not isinstance(size, int) or size == got for size, got in zip(tensor.shape, array.shape, strict=True)
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
            raise _without_rows(output, model, str(piece.size), part.shape)
    trimmed = [part[: piece.stop - piece.start] for piece, part in parts]
    return trimmed[0] if len(trimmed) == 1 else np.concatenate(trimmed)


def tile(sample: Mapping[str, Array], size: int) -> dict[str, Array]:
    """Returns a batch of that length, of a sample's rows in turn."""
    return {name: np.resize(array, (size, *array.shape[1:])) for name, array in sample.items()}
