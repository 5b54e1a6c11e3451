"""Models that a precision breaks in a few places only: float16 beyond 65504, int8 where ranges are wide."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.builders import build_model, tensor, value

WIDTH = 32

_SCALES = {"gain": 1000.0, "more_gain": 1000.0, "loss": 0.001, "more_loss": 0.001}


def overflowing_net() -> onnx.ModelProto:
    """`x` [batch, 32] through 32 MatMul, Add and Relu, and an excursion beyond 65504, to `y`, of about 1.

    Of some 100 nodes, float16 breaks four of the excursion: it takes its input to about 1e6, swaps the halves
    of each row, and comes back. What it needs the swap for: the CPU provider computes Mul in float32 whatever
    the model says, and so does a lone float16 kernel between two such nodes; only what passes between two
    float16 kernels, here Split and Concat, is really float16.
    """
    rng = np.random.default_rng(0)
    nodes, x = [], "x"
    weights = [tensor(name, np.float32(scale)) for name, scale in _SCALES.items()]
    weights.append(tensor("halves", np.array([WIDTH // 2, WIDTH // 2], np.int64)))
    for layer in range(32):
        nodes += _layer(layer, x)
        weights += _layer_weights(layer, rng)
        if layer == 15:
            nodes += _excursion(nodes[-1].output[0])
        x = nodes[-1].output[0]
    nodes.append(helper.make_node("Identity", [x], ["y"], name="last"))
    return build_model(
        nodes,
        inputs=[value("x", TensorProto.FLOAT, ["batch", WIDTH])],
        outputs=[value("y", TensorProto.FLOAT, ["batch", WIDTH])],
        initializers=weights,
    )


def outlier_net() -> onnx.ModelProto:
    """`x` [batch, 32] through MatMul and Relu to `y`; one MatMul reads a column of 10,000 times the range."""
    rng, nodes, weights, x = np.random.default_rng(0), [], [], "x"
    gain = np.where(np.arange(WIDTH) == 3, np.float32(1e4), np.float32(1))
    for layer in range(24):
        weight = rng.normal(0, (2 / WIDTH) ** 0.5, (WIDTH, WIDTH))
        if layer == 7:
            weight /= gain[:, None]
            weights.append(tensor("gain", gain))
            nodes.append(helper.make_node("Mul", [x, "gain"], ["wide"], name="widen"))
            x = "wide"
        weights.append(tensor(f"w{layer}", weight.astype(np.float32)))
        y = "y" if layer == 23 else f"h{layer}"
        nodes.append(helper.make_node("MatMul", [x, f"w{layer}"], [f"p{layer}"], name=f"matmul{layer}"))
        nodes.append(helper.make_node("Relu", [f"p{layer}"], [y], name=f"relu{layer}"))
        x = y
    return build_model(
        nodes,
        inputs=[value("x", TensorProto.FLOAT, ["batch", WIDTH])],
        outputs=[value("y", TensorProto.FLOAT, ["batch", WIDTH])],
        initializers=weights,
    )


def _layer(layer: int, x: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("MatMul", [x, f"w{layer}"], [f"p{layer}"], name=f"matmul{layer}"),
        helper.make_node("Add", [f"p{layer}", f"b{layer}"], [f"s{layer}"], name=f"add{layer}"),
        helper.make_node("Relu", [f"s{layer}"], [f"h{layer}"], name=f"relu{layer}"),
    ]


def _layer_weights(layer: int, rng: np.random.Generator) -> list[onnx.TensorProto]:
    weight = rng.normal(0, (2 / WIDTH) ** 0.5, (WIDTH, WIDTH))
    bias = rng.normal(0, 0.1, WIDTH)
    return [tensor(f"w{layer}", weight.astype(np.float32)), tensor(f"b{layer}", bias.astype(np.float32))]


def _excursion(x: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Mul", [x, "gain"], ["raised"], name="raise"),
        helper.make_node("Mul", ["raised", "more_gain"], ["high"], name="surge"),
        helper.make_node("Split", ["high", "halves"], ["left", "right"], name="halve", axis=1),
        helper.make_node("Concat", ["right", "left"], ["swapped"], name="swap", axis=1),
        helper.make_node("Mul", ["swapped", "loss"], ["low"], name="lower"),
        helper.make_node("Mul", ["low", "more_loss"], ["settled"], name="settle"),
    ]
