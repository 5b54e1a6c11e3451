"""The convolution nets of the onnx package at full size. For child processes.

The package ships them "light": every weight is a `ConstantOfShape`. Here each becomes an initializer of its
shape, drawn so that activations keep their scale through the net (He et al., 2015, arXiv:1502.01852) and the
class scores are neither uniform nor saturated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from onnx import numpy_helper
from onnx.backend import test as onnx_tests

from ortprep.stages.fetch.demo.seeded_weights import Weight

IR_VERSION = 8
"""First that was released with opset 16; from 4 on an initializer need not be an input."""


@dataclass(frozen=True)
class _Architecture:
    """One net of the package.

    Attributes:
        file: Its name there, without suffix.
        gain: Factor on the last layer's weights, found by trying, that spreads the class scores.
    """

    file: str
    gain: float = 1.0


_ARCHITECTURES = {
    "alexnet": _Architecture("light_bvlc_alexnet"),
    "densenet121": _Architecture("light_densenet121"),
    "inception-v1": _Architecture("light_inception_v1"),
    "inception-v2": _Architecture("light_inception_v2", gain=0.5),
    "resnet50": _Architecture("light_resnet50", gain=0.5),
    "shufflenet": _Architecture("light_shufflenet", gain=1 / 64),
    "squeezenet": _Architecture("light_squeezenet"),
    "vgg19": _Architecture("light_vgg19"),
    "zfnet512": _Architecture("light_zfnet512"),
}

_Use = tuple[onnx.NodeProto, int]


def build_vision_net(name: str) -> tuple[onnx.ModelProto, tuple[Weight, ...]]:
    """Returns a net without its weights, and the weights to be drawn."""
    architecture = _ARCHITECTURES[name]
    model = onnx.load(Path(onnx_tests.__file__).parent / "data" / "light" / f"{architecture.file}.onnx")
    shapes = _take_out_weights(model.graph)
    weights = tuple(_weights(model.graph, shapes, architecture.gain))
    model.ir_version = IR_VERSION
    return model, weights


def _take_out_weights(graph: onnx.GraphProto) -> Mapping[str, tuple[int, ...]]:
    """Removes float weights, and inputs that have a value, from a graph; returns the weights' shapes."""
    held = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {name: tuple(t.dims) for name, t in held.items() if t.data_type == onnx.TensorProto.FLOAT}
    for node in [node for node in graph.node if node.op_type == "ConstantOfShape"]:
        shapes[node.output[0]] = tuple(int(size) for size in numpy_helper.to_array(held[node.input[0]]))
        graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    initializers = [tensor for name, tensor in held.items() if name in used and name not in shapes]
    inputs = [item for item in graph.input if item.name not in held]
    for field, items in (("initializer", initializers), ("input", inputs)):
        graph.ClearField(field)
        getattr(graph, field).extend(items)
    return {name: shape for name, shape in shapes.items() if name in used}


def _weights(graph: onnx.GraphProto, shapes: Mapping[str, tuple[int, ...]], gain: float) -> Iterator[Weight]:
    users: dict[str, list[_Use]] = defaultdict(list)
    for node in graph.node:
        for position, name in enumerate(node.input):
            users[name].append((node, position))
    last = [node for node in graph.node if node.op_type in ("Conv", "Gemm")][-1]
    for name, dims in shapes.items():
        node, position = _real_use(users, name)
        weight = _weight(name, dims, node, position)
        if node.op_type == "BatchNormalization" and position == 1 and _is_summed(users, node):
            # Half of it: each sum of two branches would otherwise double the variance.
            weight = replace(weight, mean=weight.mean / 2)
        elif node is last and position == 1:
            weight = replace(weight, spread=weight.spread * gain)
        yield weight


def _real_use(users: Mapping[str, list[_Use]], name: str) -> _Use:
    """Returns where a weight is used, past operators that only give it another shape."""
    node, position = users[name][0]
    while node.op_type in ("Unsqueeze", "Reshape"):
        node, position = users[node.output[0]][0]
    return node, position


def _is_summed(users: Mapping[str, list[_Use]], node: onnx.NodeProto) -> bool:
    return any(user.op_type == "Sum" for user, _ in users[node.output[0]])


def _weight(name: str, dims: tuple[int, ...], node: onnx.NodeProto, position: int) -> Weight:
    if node.op_type in ("Conv", "Gemm") and position == 1:
        return Weight(name, dims, 0.0, math.sqrt(2.0 / _fan_in(dims, node)))
    scale = (node.op_type, position) in (("BatchNormalization", 1), ("Mul", 1))
    variance = (node.op_type, position) == ("BatchNormalization", 4)
    if scale or variance:
        return Weight(name, dims, 1.0, 0.2 if scale else 0.5, uniform=True)
    return Weight(name, dims, 0.0, 0.05)


def _fan_in(dims: tuple[int, ...], node: onnx.NodeProto) -> int:
    if node.op_type == "Conv":
        return math.prod(dims[1:])
    transposed = any(item.name == "transB" and item.i for item in node.attribute)
    return dims[-1] if transposed else dims[-2]
