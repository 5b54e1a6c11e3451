"""What can be said of a model without running it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ortprep.bundle.loader_config import TensorSpec

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv", "NhwcConv", "QLinearConv", "ConvInteger"})
_ANONYMOUS = re.compile(r"\?|-1|None|unk__.*|(p2o\.)?DynamicDimension\..*|", re.DOTALL)


@dataclass(frozen=True)
class ModelInterface:
    """What a model takes and gives.

    Attributes:
        inputs: Inputs that have no initializer, in graph order.
        outputs: Outputs, in graph order.
        index_bounds: Exclusive upper bound of integer inputs that index an initializer, by input name.
        external: Whether weights are in other files than the model.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    index_bounds: Mapping[str, int]
    external: bool


@dataclass(frozen=True)
class ModelFacts:
    """A description of a model file.

    Attributes:
        interface: Inputs, outputs and index bounds.
        opsets: Opset version by domain ("" is ai.onnx).
        ir_version: ONNX IR version.
        operators: Number of nodes by operator type (`domain.Type` outside ai.onnx), at every depth, without
            calls of the model's own functions.
        initializer_bytes: Size of all weights, external ones included.
        external: Bytes that each external data file has to have at least, by its relative path.
    """

    interface: ModelInterface
    opsets: Mapping[str, int]
    ir_version: int
    operators: Mapping[str, int]
    initializer_bytes: int
    external: Mapping[str, int]

    @property
    def domains(self) -> frozenset[str]:
        """Domains of the operators ("" is ai.onnx)."""
        return frozenset(kind.rpartition(".")[0] for kind in self.operators)

    @property
    def has_convolutions(self) -> bool:
        """Whether there is a convolution."""
        return self._has(_CONVOLUTIONS)

    def _has(self, types: frozenset[str]) -> bool:
        return any(kind.rpartition(".")[2] in types for kind in self.operators)


def dimension_name(written: str) -> str | None:
    """Returns the name of a symbolic dimension, None for one that only says that the size is not known.

    Paddle's exporters write `?`, `DynamicDimension.0` or `p2o.DynamicDimension.0`, tf2onnx `unk__6`, others
    nothing at all. Such dimensions are independent of each other, even where they are written alike.
    """
    return None if _ANONYMOUS.fullmatch(written) else written
