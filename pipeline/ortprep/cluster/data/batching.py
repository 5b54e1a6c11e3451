"""Rows to the batches that a model takes, and its answers back to rows. Functions of values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ortprep.bundle.loader_config import LoaderConfig, TensorSpec
from ortprep.errors import PoolError
from ortprep.runtime.tensors.element_types import Array


@dataclass(frozen=True)
class Piece:
    """Rows from `start` to `stop`, run as a batch of `size`; the rest of it repeats the last row."""

    start: int
    stop: int
    size: int


def plan_pieces(count: int, sizes: Sequence[int]) -> tuple[Piece, ...]:
    """Returns how rows are cut into batches.

    As many as fit go in batches of the largest size. The remainder goes in one of the smallest size that
    takes all of it, unless more than half of that would be padding: then a smaller one is filled first.

    Args:
        count: How many rows.
        sizes: Lengths of batches that the model was prepared for; none for any.
    """
    if not sizes:
        return (Piece(0, count, count),) if count else ()
    ordered = sorted(set(sizes))
    pieces, start = [], 0
    while start < count:
        size = _next_size(count - start, ordered)
        stop = min(count, start + size)
        pieces.append(Piece(start, stop, size))
        start = stop
    return tuple(pieces)


def _next_size(count: int, sizes: Sequence[int]) -> int:
    filled = [size for size in sizes if size <= count]
    padded = next((size for size in sizes if size >= count), None)
    is_wasteful = padded is None or (filled and padded > 2 * count)
    return filled[-1] if is_wasteful or padded is None else padded


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
                hint=f"OnnxPredictor(constants={{{tensor.name!r}: value}})",
            )
        first = tensor.shape[0]
        if isinstance(first, int):
            sizes[tensor.name] = first
    if len(set(sizes.values())) > 1:
        raise PoolError(
            f"inputs have different fixed batch sizes\n  expected one, got {sizes}",
            hint="OnnxPredictor(constants={INPUT: value}) for an input that is the same for every row",
        )
    return next(iter(sizes.values()), None)


def find_bucket_sizes(config: LoaderConfig) -> tuple[int, ...]:
    """Returns the lengths of batches that the opened buckets of a bundle are there for, in order."""
    names = {
        tensor.shape[0] if isinstance(tensor.shape[0], str) else f"{tensor.name}[0]"
        for tensor in config.inputs
        if tensor.shape
    }
    sizes = {size for bucket in config.variants[1:] for name, size in bucket.binding.items() if name in names}
    return tuple(sorted(sizes))


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
                f"output {output!r} of {model} does not have one row per input row\n"
                f"  expected {piece.size} along the first axis, got shape {list(part.shape)}",
                hint=f"OnnxPredictor(outputs=…) without {output!r}",
            )
    trimmed = [part[: piece.stop - piece.start] for piece, part in parts]
    return trimmed[0] if len(trimmed) == 1 else np.concatenate(trimmed)
