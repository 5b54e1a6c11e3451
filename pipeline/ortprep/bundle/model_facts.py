"""What can be said of a model without running it; its inputs, read without its weights or any library."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.onnx_wire import ELEMENT_TYPE_NAMES, WireError, read_skeleton, walk_fields

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv", "NhwcConv", "QLinearConv", "ConvInteger"})
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
_OTHER, _UNKNOWN = "a sequence, map or optional", "an unknown element type"
_ANONYMOUS = re.compile(r"\?|-1|None|unk__.*|(p2o\.)?DynamicDimension\..*|", re.DOTALL)
_LARGEST = 2**63 - 1  # above are negative sizes, by which some exporters say that they do not know
# Field numbers of onnx.proto3.
_GRAPH, _INITIALIZER, _GRAPH_INPUT = 7, 5, 11
_TENSOR_NAME = 8
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TENSOR_TYPE, _ELEMENT, _SHAPE = 1, 1, 2
_DIMENSION, _SIZE, _SYMBOL = 1, 1, 2


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
        width: Maximum number of nodes with real work that could run at the same time.
        has_1d_convolutions: Whether a convolution of the main graph has a kernel of one axis.
    """

    interface: ModelInterface
    opsets: Mapping[str, int]
    ir_version: int
    operators: Mapping[str, int]
    initializer_bytes: int
    external: Mapping[str, int]
    width: int = 1
    has_1d_convolutions: bool = False

    @property
    def domains(self) -> frozenset[str]:
        """Domains of the operators ("" is ai.onnx)."""
        return frozenset(kind.rpartition(".")[0] for kind in self.operators)

    @property
    def has_convolutions(self) -> bool:
        """Whether there is a convolution."""
        return self._has(_CONVOLUTIONS)

    @property
    def has_control_flow(self) -> bool:
        """Whether a node holds a subgraph."""
        return self._has(_CONTROL_FLOW)

    def _has(self, types: frozenset[str]) -> bool:
        return any(kind.rpartition(".")[2] in types for kind in self.operators)


def dimension_name(written: str) -> str | None:
    """Returns the name of a symbolic dimension, None for one that only says that the size is not known.

    Paddle's exporters write `?`, `DynamicDimension.0` or `p2o.DynamicDimension.0`, tf2onnx `unk__6`, others
    nothing at all. Such dimensions are independent of each other, even where they are written alike.
    """
    return None if _ANONYMOUS.fullmatch(written) else written


def read_inputs(path: Path) -> tuple[TensorSpec, ...]:
    """Returns a model's inputs in order, without those that initializers fill.

    Raises:
        WireError: The file is not a protobuf message, or has no graph.
        OSError: It cannot be read.
    """
    graph = _last(read_skeleton(path), _GRAPH)
    if graph is None:
        raise WireError("no graph in it")
    filled = {_text(_last(one, _TENSOR_NAME)) for one in _all(graph, _INITIALIZER)}
    inputs = (_describe(one) for one in _all(graph, _GRAPH_INPUT))
    return tuple(one for one in inputs if one.name not in filled)


def _describe(value: bytes) -> TensorSpec:
    name = _text(_last(value, _VALUE_NAME))
    tensor = _last(_last(value, _VALUE_TYPE) or b"", _TENSOR_TYPE)
    if tensor is None:
        return TensorSpec(name, _OTHER, None)
    shape = _last(tensor, _SHAPE)
    axes = None if shape is None else tuple(_axis(one) for one in _all(shape, _DIMENSION))
    return TensorSpec(name, ELEMENT_TYPE_NAMES.get(_number(tensor, _ELEMENT) or 0, _UNKNOWN), axes)


def _axis(dimension: bytes) -> int | str | None:
    size = _number(dimension, _SIZE)
    if size is not None and size <= _LARGEST:
        return size
    return dimension_name(_text(_last(dimension, _SYMBOL)))


def _all(message: bytes, number: int) -> Iterator[bytes]:
    return (value for field, value in walk_fields(message) if field == number and isinstance(value, bytes))


def _last(message: bytes, number: int) -> bytes | None:
    return next(reversed(list(_all(message, number))), None)


def _number(message: bytes, number: int) -> int | None:
    values = (value for field, value in walk_fields(message) if field == number)
    return next((value for value in values if isinstance(value, int)), None)


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
