"""Writing a model with seeded weights, one block of one weight in memory at a time. For child processes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from ortprep.bundle.onnx_wire import write_graph_field, write_tensor_field

_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Weight:
    """A float32 initializer and the distribution its values are drawn from.

    Attributes:
        name: Its name in the graph; with the dims it decides the values.
        dims: Its shape.
        mean: Of the values.
        spread: Standard deviation, or half the width if `uniform`.
        uniform: Whether the values are uniform instead of normal.
    """

    name: str
    dims: tuple[int, ...]
    mean: float
    spread: float
    uniform: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all values."""
        return 4 * math.prod(self.dims)


def write_seeded_model(path: Path, model: onnx.ModelProto, weights: Sequence[Weight]) -> None:
    """Writes a model and its weights into one file.

    Raises:
        OSError: The file cannot be written.
    """
    shell = onnx.ModelProto()
    shell.CopyFrom(model)
    shell.ClearField("graph")
    graph = model.graph.SerializeToString(deterministic=True)
    heads = [write_tensor_field(header=_header(weight), values_bytes=weight.size_bytes) for weight in weights]
    graph_bytes = len(graph) + sum(map(len, heads)) + sum(weight.size_bytes for weight in weights)
    with path.open("wb") as file:
        file.write(shell.SerializeToString(deterministic=True))
        file.write(write_graph_field(graph_bytes))
        file.write(graph)
        for head, weight in zip(heads, weights, strict=True):
            file.write(head)
            for block in _draw(weight):
                file.write(block.tobytes())


def _header(weight: Weight) -> bytes:
    tensor = TensorProto(name=weight.name, dims=weight.dims, data_type=TensorProto.FLOAT)
    header: bytes = tensor.SerializeToString(deterministic=True)
    return header


def _draw(weight: Weight) -> Iterator[NDArray[np.float32]]:
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(weight.name.encode())))
    remaining = math.prod(weight.dims)
    while remaining:
        count = min(remaining, _BLOCK_ELEMENTS)
        if weight.uniform:
            values = rng.random(count, np.float32) * np.float32(2) - np.float32(1)
        else:
            values = rng.standard_normal(count, np.float32)
        yield (values * np.float32(weight.spread) + np.float32(weight.mean)).astype("<f4")
        remaining -= count
