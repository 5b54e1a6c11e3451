"""Description of a model to export. Pure; does not import PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DYNAMO, TORCHSCRIPT = "dynamo", "torchscript"
"""PyTorch's exporters: by `torch.export`, and the older one by tracing."""

Sizes = Mapping[str, int]
"""Size of every dynamic axis, by name."""


@dataclass(frozen=True)
class Input:
    """One input of a model.

    Attributes:
        name: In the ONNX model.
        axes: A size, or the name of a dynamic axis, per dimension.
        dtype: `float32` or `int64`.
        low: Least value it is fed.
        high: Greatest value it is fed.
    """

    name: str
    axes: tuple[int | str, ...]
    dtype: str
    low: float
    high: float

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape it has where the dynamic axes have these sizes."""
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)


@dataclass(frozen=True)
class Exportable:
    """A model that can be exported.

    Attributes:
        build: Makes the `torch.nn.Module` in evaluation mode, from PyTorch's seeded generator. It takes one
            tensor per input and returns one per output, in their order.
        inputs: Its inputs; the ones from number `variadic` on are one variadic parameter.
        outputs: Names of its outputs.
        sizes: What production sends; the first set is the primary one.
        example: What the exporter traces with: no two dynamic axes of one size, none of size 1, so that no
            axis is taken for another or for a constant.
        variadic: How many inputs have a parameter of their own; None if all do.
        exporter: `DYNAMO` or `TORCHSCRIPT`.
    """

    build: Callable[[], Any]
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    sizes: tuple[Sizes, ...]
    example: Sizes
    variadic: int | None = None
    exporter: str = DYNAMO


def floats(name: str, axes: tuple[int | str, ...], *, low: float = -1.0, high: float = 1.0) -> Input:
    """Declares a float32 input, drawn evenly from a range."""
    return Input(name, axes, "float32", low, high)


def integers(name: str, axes: tuple[int | str, ...], *, low: int, high: int) -> Input:
    """Declares an int64 input, drawn evenly from a range that includes both ends."""
    return Input(name, axes, "int64", low, high)
