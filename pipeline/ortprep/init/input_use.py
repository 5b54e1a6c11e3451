"""Follows the inputs of a graph to the operators that say what they are.

For child processes: it reads `onnx` messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortprep.init.graph_facts import InputUse
from ortprep.runtime.tensors.element_types import Array
from ortprep.stages.core.graphs.graph_walk import MAX_RANK, subgraphs, values_bytes, walk_initializers

Axes = tuple[int | None, ...]
"""Which axis of the input each axis of a value is; None for one that was added."""

_UNCHANGED = frozenset({"Cast", "Identity", "Clip", "Dropout", "QuantizeLinear", "DequantizeLinear"})
_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div"})
_RESIZED = frozenset({"Pad", "Slice", "Resize", "Upsample"})
_MOVED = frozenset({"Reshape", "Flatten", "Gather", "Expand", "Tile", "Split"})
_CONVOLUTIONS = frozenset(
    {"Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "FusedConv", "NhwcFusedConv"}
)
_RECURRENT = frozenset({"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"})
_MATRICES = {"MatMul": 1, "Gemm": 1, "MatMulInteger": 1, "FusedMatMul": 1, "DynamicQuantizeMatMul": 1}
_MAX_WORDS = 16
_MIN_PIXEL_MEAN = 30.0


@dataclass
class _Trace:
    """A value of an input: which one, and where its axes went; `axes` is None once that is lost."""

    source: str
    axes: Axes | None
    is_resized: bool = False


@dataclass
class _Found:
    """What was found of one input so far."""

    operators: set[str] = field(default_factory=set)
    sizes: dict[int, int] = field(default_factory=dict)
    rank: int | None = None
    spatial: tuple[int, ...] = ()
    batch: int | None = None
    roles: set[str] = field(default_factory=set)
    compared: list[int] = field(default_factory=list)
    scaled_from: float | None = None
    classes: int | None = None
    words: list[str] = field(default_factory=list)
    window: int = 0

    def result(self) -> InputUse:
        return InputUse(
            operators=tuple(sorted(self.operators)),
            sizes=self.sizes,
            rank=self.rank,
            spatial=self.spatial,
            batch=self.batch,
            roles=tuple(sorted(self.roles)),
            compared=tuple(dict.fromkeys(self.compared)),
            scaled_from=self.scaled_from,
            classes=self.classes,
            words=tuple(dict.fromkeys(self.words))[:_MAX_WORDS],
            window=self.window,
        )


@dataclass
class _Scope:
    """What is known of the values that a graph can see: constants by name, and traces of inputs."""

    constants: dict[str, TensorProto] = field(default_factory=dict)
    traces: dict[str, _Trace] = field(default_factory=dict)

    def inner(self) -> _Scope:
        return _Scope(dict(self.constants), dict(self.traces))

    def dims(self, name: str) -> tuple[int, ...] | None:
        tensor = self.constants.get(name)
        return None if tensor is None else tuple(tensor.dims)

    def values(self, name: str) -> Array | None:
        """Returns a constant's values, None if they were left out of the skeleton or are elsewhere."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        try:
            return np.asarray(numpy_helper.to_array(tensor))
        except (ValueError, TypeError):
            return None


def find_uses(graph: onnx.GraphProto) -> Mapping[str, InputUse]:
    """Returns how a graph uses each of its inputs, by name; values of large tensors need not be there."""
    held = {tensor.name for tensor in graph.initializer}
    found = {item.name: _Found() for item in graph.input if item.name not in held}
    scope = _Scope()
    for item in graph.input:
        if item.name in found:
            shape = item.type.tensor_type
            rank = len(shape.shape.dim) if shape.HasField("shape") else None
            scope.traces[item.name] = _Trace(item.name, None if rank is None else tuple(range(rank)))
    _follow(graph, scope, found)
    return {name: one.result() for name, one in found.items()}


def _follow(graph: onnx.GraphProto, scope: _Scope, found: dict[str, _Found]) -> None:
    scope.constants.update({tensor.name: tensor for tensor in graph.initializer})
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            _keep_constant(node, scope)
            continue
        for position, name in enumerate(node.input):
            trace = scope.traces.get(name)
            if trace is not None:
                _note(node, position, trace, scope, found[trace.source])
        _pass_on(node, scope)
        for inner in subgraphs(node):
            _follow(inner, scope.inner(), found)


def _keep_constant(node: onnx.NodeProto, scope: _Scope) -> None:
    for attribute in node.attribute:
        if attribute.name == "value":
            scope.constants[node.output[0]] = attribute.t
        elif attribute.name == "value_int":
            scope.constants[node.output[0]] = numpy_helper.from_array(np.array(attribute.i))
        elif attribute.name == "value_float":
            scope.constants[node.output[0]] = numpy_helper.from_array(np.array(attribute.f, np.float32))
        elif attribute.name == "value_ints":
            scope.constants[node.output[0]] = numpy_helper.from_array(np.array(list(attribute.ints)))


def _note(node: onnx.NodeProto, position: int, trace: _Trace, scope: _Scope, found: _Found) -> None:
    """Notes what a node that takes a traced value says of it."""
    kind = node.op_type
    found.operators.add(kind)
    if kind in _CONVOLUTIONS and position == 0:
        _note_convolution(node, trace, scope, found)
    elif kind in _RECURRENT:
        _note_recurrent(node, position, trace, scope, found)
    elif kind in _MATRICES and position == 0:
        _note_matrix(node, trace, scope, found)
    elif kind in _ELEMENTWISE:
        _note_elementwise(node, position, trace, scope, found)
    elif kind == "OneHot" and position == 0:
        depth = scope.values(_input(node, 1))
        if depth is not None and depth.size == 1:
            found.classes = int(depth.reshape(-1)[0])
    elif kind in ("If", "Loop") and position < 2:
        found.roles.add("condition" if kind == "If" or position == 1 else "trip count")
    elif kind == "Equal":
        _note_equal(scope.values(_input(node, 1 - position)), found)
    elif kind in ("LabelEncoder", "CategoryMapper", "OneHotEncoder"):
        names = ("keys_strings", "cats_strings")
        found.words += [
            text.decode("utf-8", "replace")
            for attribute in node.attribute
            if attribute.name in names
            for text in attribute.strings[:_MAX_WORDS]
        ]


def _note_equal(other: Array | None, found: _Found) -> None:
    """Notes a number that an input is compared with; all of 0 to N-1 make a one-hot encoding of N classes."""
    if other is None or other.size == 0 or other.dtype.kind not in "iu":
        return
    numbers = other.reshape(-1)
    if numbers.size == 1:
        found.compared.append(int(numbers[0]))
    elif numbers.size == max(other.shape) and np.array_equal(numbers, np.arange(numbers.size)):
        found.classes = numbers.size


def _note_convolution(node: onnx.NodeProto, trace: _Trace, scope: _Scope, found: _Found) -> None:
    weight = scope.dims(_input(node, 3 if node.op_type == "QLinearConv" else 1))
    if weight is None or len(weight) < 3:
        return
    if trace.axes is None:
        found.rank = found.rank or (len(weight) if not found.operators & _MOVED else None)
        return
    if len(trace.axes) != len(weight):
        return
    group = next((int(one.i) for one in node.attribute if one.name == "group"), 1)
    channels = weight[0] if node.op_type == "ConvTranspose" else weight[1] * group
    _settle(found, trace, 1, channels)
    spatial = tuple(axis for axis in trace.axes[2:] if axis is not None)
    if not found.spatial:
        found.spatial = spatial
    if len(spatial) == 1:
        found.window = max(found.window, *weight[2:])


def _note_recurrent(node: onnx.NodeProto, position: int, trace: _Trace, scope: _Scope, found: _Found) -> None:
    if position == 4:
        found.roles.add("lengths")
    elif position in (5, 6):
        found.roles.add("state")
        if trace.axes is not None and len(trace.axes) == 3:
            found.batch = trace.axes[1]
    elif position == 0:
        found.rank = found.rank or 3
        weight = scope.dims(_input(node, 1))
        if trace.axes is not None and len(trace.axes) == 3:
            if weight is not None and len(weight) == 3:
                _settle(found, trace, 2, weight[2])
            layout = next((int(one.i) for one in node.attribute if one.name == "layout"), 0)
            found.batch = trace.axes[0 if layout else 1]


def _note_matrix(node: onnx.NodeProto, trace: _Trace, scope: _Scope, found: _Found) -> None:
    weight = scope.dims(_input(node, 1))
    if weight is None or len(weight) != 2 or not trace.axes:
        return
    attributes = {one.name: one.i for one in node.attribute}
    rows = weight[1] if node.op_type == "Gemm" and attributes.get("transB") else weight[0]
    _settle(found, trace, 0 if node.op_type == "Gemm" and attributes.get("transA") else -1, rows)


def _settle(found: _Found, trace: _Trace, axis: int, size: int) -> None:
    """Notes the size of an axis of a value, unless it was cut or padded on the way."""
    own = None if trace.axes is None or trace.is_resized else trace.axes[axis]
    if own is not None and size > 0:
        found.sizes.setdefault(own, size)


def _note_elementwise(
    node: onnx.NodeProto, position: int, trace: _Trace, scope: _Scope, found: _Found
) -> None:
    other = _input(node, 1 - position)
    dims = scope.dims(other)
    if dims is None:
        return
    for back, size in enumerate(reversed(dims[-len(trace.axes or ()) :]), start=1):
        if trace.axes and size > 1:
            _settle(found, trace, -back, size)
    values = scope.values(other)
    if values is None or values.size == 0 or values.dtype.kind not in "fiu" or position != 0:
        return
    extent = float(np.abs(values.astype(np.float64)).max())
    is_scale = (node.op_type == "Div" and 250 <= extent <= 256) or (
        node.op_type == "Mul" and extent > 0 and 250 <= 1 / extent <= 256
    )
    is_mean = node.op_type == "Sub" and _MIN_PIXEL_MEAN <= extent <= 255
    if is_scale or is_mean:
        found.scaled_from = 255.0


def _pass_on(node: onnx.NodeProto, scope: _Scope) -> None:
    """Notes which outputs of a node still are an input's values, and where its axes went."""
    kind = node.op_type
    traces = [scope.traces[name] for name in node.input if name in scope.traces]
    if not traces or not node.output:
        return
    trace = traces[0]
    if kind in _UNCHANGED or (kind in _ELEMENTWISE and len(traces) == 1 and _has_constant(node, scope)):
        scope.traces[node.output[0]] = trace
    elif kind in ("Transpose", "Unsqueeze", "Squeeze") and node.input[0] in scope.traces:
        axes = _rearrange(node, trace.axes, scope)
        scope.traces[node.output[0]] = _Trace(trace.source, axes, trace.is_resized)
    elif kind in _RESIZED and node.input[0] in scope.traces:
        scope.traces[node.output[0]] = _Trace(trace.source, trace.axes, is_resized=True)
    elif kind in _MOVED and node.input[0] in scope.traces:
        for output in node.output:
            scope.traces[output] = _Trace(trace.source, None)


def _has_constant(node: onnx.NodeProto, scope: _Scope) -> bool:
    return any(name in scope.constants for name in node.input)


def _rearrange(node: onnx.NodeProto, axes: Axes | None, scope: _Scope) -> Axes | None:
    if axes is None:
        return None
    if node.op_type == "Transpose":
        order = next((list(one.ints) for one in node.attribute if one.name == "perm"), None)
        order = list(reversed(range(len(axes)))) if order is None else order
        return tuple(axes[index] for index in order) if sorted(order) == list(range(len(axes))) else None
    places = _places(node, scope)
    if places is None:
        return None
    if node.op_type == "Squeeze":
        gone = {place % max(len(axes), 1) for place in places}
        return tuple(axis for index, axis in enumerate(axes) if index not in gone)
    rank = len(axes) + len(places)
    if rank > MAX_RANK:
        return None
    added = {place % rank for place in places}
    rest = iter(axes)
    return tuple(None if index in added else next(rest, None) for index in range(rank))


def _places(node: onnx.NodeProto, scope: _Scope) -> list[int] | None:
    own = next((list(one.ints) for one in node.attribute if one.name == "axes"), None)
    if own is not None:
        return own
    values = scope.values(_input(node, 1))
    return None if values is None else [int(one) for one in values.reshape(-1)]


def _input(node: onnx.NodeProto, position: int) -> str:
    return node.input[position] if 0 <= position < len(node.input) else ""


def is_mostly_half(model: onnx.ModelProto) -> bool:
    """Says whether most bytes of a model's floating-point weights are float16 or bfloat16."""
    kinds = _bytes_by_type(walk_initializers(model))
    half = kinds.get(TensorProto.FLOAT16, 0) + kinds.get(TensorProto.BFLOAT16, 0)
    return half > kinds.get(TensorProto.FLOAT, 0)


def has_quantized_weights(model: onnx.ModelProto) -> bool:
    """Says whether a model holds weights of 8 bits or fewer, to compute with."""
    narrow = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4)
    return any(
        tensor.data_type in narrow and math.prod(tensor.dims) >= 256 for tensor in walk_initializers(model)
    )


def _bytes_by_type(tensors: Iterable[TensorProto]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        sizes[tensor.data_type] = sizes.get(tensor.data_type, 0) + values_bytes(tensor)
    return sizes
