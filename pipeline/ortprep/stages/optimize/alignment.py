"""External data whose tensors begin on pages.

ONNX Runtime aligns tensors above 1 MiB when it writes a data file, and puts smaller ones where the last one
ended. Direct reads (`O_DIRECT`, GPUDirect Storage) need pages for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import onnx

from ortprep.options import PAGE_BYTES
from ortprep.stages.core.graphs.graph_walk import values_bytes, walk_tensors

_PIECE_BYTES = 16 * 1024 * 1024
_PREPACKED = re.compile(r"(?<=\|)([0-9]+);([0-9]+)(?=;)")
"""Offset and length of a block in the value of a `prepacked_…` entry, `KEY|OFFSET;LENGTH;CHECKSUM|…`."""

_Extent = tuple[int, int]
"""Offset and length in a data file, in bytes."""


def align_external_data(model: onnx.ModelProto, data: Path) -> bool:
    """Moves what a model has in a data file to multiples of `PAGE_BYTES`, in order and in place.

    Nothing moves towards the start, so a file needs no second copy, and tensors that are aligned stay where
    they are as long as the gap before them suffices.

    Args:
        model: Its references are changed; other data files are left alone.
        data: The data file. It grows by less than a page for each tensor.

    Returns:
        Whether anything moved.

    Raises:
        OSError: The disk is full.
    """
    tensors = [tensor for tensor in walk_tensors(model) if _location(tensor) == data.name]
    extents = sorted({extent for tensor in tensors for extent in _extents(tensor)})
    moves = _plan(extents)
    if all(old == new for (old, _), new in moves.items()):
        return False
    _move(data, moves)
    for tensor in tensors:
        _refer(tensor, moves)
    return True


def _location(tensor: onnx.TensorProto) -> str | None:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), None)


def _extents(tensor: onnx.TensorProto) -> list[_Extent]:
    """Returns where a tensor's values are, and the arranged copies of them that prepacking saved."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    extents = [(int(entries.get("offset", "0")), int(entries.get("length", values_bytes(tensor))))]
    for key, value in entries.items():
        if key.startswith("prepacked_"):
            extents += [(int(offset), int(length)) for offset, length in _PREPACKED.findall(value)]
    return extents


def _plan(extents: list[_Extent]) -> dict[_Extent, int]:
    """Returns the new offset of every extent; extents are sorted."""
    moves, end = {}, 0
    for offset, length in extents:
        new = -(-max(offset, end) // PAGE_BYTES) * PAGE_BYTES
        moves[offset, length], end = new, new + length
    return moves


def _move(data: Path, moves: dict[_Extent, int]) -> None:
    """Moves extents, the last one first and each from its end, and clears what is between them."""
    with data.open("r+b") as file:
        for (old, length), new in reversed(moves.items()):
            remaining = length if new != old else 0
            while remaining:
                size = min(remaining, _PIECE_BYTES)
                remaining -= size
                file.seek(old + remaining)
                piece = file.read(size)
                file.seek(new + remaining)
                file.write(piece)
        ends = [0, *(new + length for (_, length), new in moves.items())]
        for end, start in zip(ends, moves.values(), strict=False):
            file.seek(end)
            file.write(bytes(start - end))


def _refer(tensor: onnx.TensorProto, moves: Mapping[_Extent, int]) -> None:
    values, *_ = _extents(tensor)
    for entry in tensor.external_data:
        if entry.key == "offset":
            entry.value = str(moves[values])
        elif entry.key.startswith("prepacked_"):
            entry.value = _PREPACKED.sub(
                lambda match: f"{moves[int(match[1]), int(match[2])]};{match[2]}", entry.value
            )
