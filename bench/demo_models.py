"""Full-size convolution nets, made offline: those of the onnx package, with seeded weights.

The package ships them "light": every weight is a `ConstantOfShape`. Here each becomes an initializer of its
shape, drawn so that activations keep their scale through the net (He et al., 2015, arXiv:1502.01852) and the
class scores are neither uniform nor saturated. The same versions of onnx and numpy give the same bytes.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.backend import test

_GAINS = {"inception-v2": 0.5, "resnet50": 0.5, "shufflenet": 1 / 64}
"""Factor on the last layer's weights that spreads a demo model's class scores, if not 1; found by trying."""

_IR_VERSION = 8  # the first that was released with opset 16; from 4 on an initializer need not be an input


def draw_weight(
    name: str, dims: tuple[int, ...], *, mean: float, spread: float, uniform: bool = False
) -> NDArray[np.float32]:
    """Returns a weight's values, which its name and its dims decide.

    Args:
        name: Name of the weight.
        dims: Shape of the weight.
        mean: Mean of the values.
        spread: Standard deviation, or half the width of a uniform distribution.
        uniform: Whether the values are uniform instead of normal.
    """
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    values = rng.random(dims, np.float32) * 2 - 1 if uniform else rng.standard_normal(dims, np.float32)
    return values * np.float32(spread) + np.float32(mean)


def write_demo_model(name: str, path: Path) -> Path:
    """Writes a net: `alexnet`, `densenet121`, `inception-v1`, `inception-v2`, `resnet50`, …, `zfnet512`."""
    file = f"light_{'bvlc_' if name == 'alexnet' else ''}{name.replace('-', '_')}.onnx"
    model = onnx.load(Path(test.__file__).parent / "data" / "light" / file)
    graph = model.graph
    shapes = _take_out_weights(graph)
    users: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node in graph.node:
        for position, value in enumerate(node.input):
            users[value].append((node, position))
    last = [node for node in graph.node if node.op_type in ("Conv", "Gemm")][-1]
    for weight, dims in shapes.items():
        node, position = users[weight][0]
        while node.op_type in ("Unsqueeze", "Reshape"):  # they only give it another shape
            node, position = users[node.output[0]][0]
        mean, spread, uniform = _distribution(dims, node, position)
        if (node.op_type, position) == ("BatchNormalization", 1):
            # Each sum of two branches would otherwise double the variance.
            mean /= 2 if any(user.op_type == "Sum" for user, _ in users[node.output[0]]) else 1
        spread *= _GAINS.get(name, 1.0) if node is last and position == 1 else 1
        values = draw_weight(weight, dims, mean=mean, spread=spread, uniform=uniform)
        graph.initializer.append(numpy_helper.from_array(values, weight))
    model.ir_version = _IR_VERSION
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def _take_out_weights(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Removes float weights, and inputs that have a value, from a graph; returns the weights' shapes."""
    held = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {name: tuple(t.dims) for name, t in held.items() if t.data_type == TensorProto.FLOAT}
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


def _distribution(dims: tuple[int, ...], node: onnx.NodeProto, position: int) -> tuple[float, float, bool]:
    """Returns mean, spread and whether it is uniform, of a weight by where it is used."""
    match node.op_type, position:
        case "Conv", 1:
            return 0.0, math.sqrt(2.0 / math.prod(dims[1:])), False
        case "Gemm", 1:
            transposed = any(item.name == "transB" and item.i for item in node.attribute)
            return 0.0, math.sqrt(2.0 / (dims[-1] if transposed else dims[-2])), False
        case ("BatchNormalization", 1) | ("Mul", 1):
            return 1.0, 0.2, True
        case "BatchNormalization", 4:
            return 1.0, 0.5, True
    return 0.0, 0.05, False
