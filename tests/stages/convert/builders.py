"""A model that float16 breaks in a few places only: where it computes beyond 65504 and scales back."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.builders import build_model, tensor, value

WIDTH = 32

GAIN, LOSS = 1000.0, 0.001
"""What goes up by `GAIN` twice comes down by `LOSS` twice; both are within float16's range."""


def overflowing_names(*, excursions: int = 1) -> tuple[str, ...]:
    """Names of the nodes that write or read a value beyond 65504, in the order they run in."""
    parts = ("surge", "halve", "swap", "lower")
    return tuple(f"{part}{index}" for index in range(excursions) for part in parts)


def overflowing_net(*, layers: int = 32, excursions: int = 1, seed: int = 0) -> onnx.ModelProto:
    """`x` [batch, 32] through `layers` of MatMul, Add, Relu, and excursions beyond 65504, to `y`, of about 1.

    Of some 100 nodes an excursion has four that float16 breaks (`overflowing_names`): it takes its input to
    about 1e6, swaps the halves of each row, and comes back. What it needs the swap for: the CPU provider
    computes Mul in float32 whatever the model says, and so does a lone float16 kernel between two such nodes;
    only what passes between two float16 kernels, here Split and Concat, is really float16.

    Args:
        layers: Three nodes each.
        excursions: How many, evenly spread; fewer than layers.
        seed: Of the weights.
    """
    rng = np.random.default_rng(seed)
    nodes, weights, x = [], [], "x"
    after = {(index + 1) * layers // (excursions + 1): index for index in range(excursions)}
    for layer in range(layers):
        nodes += _layer(layer, x)
        weights += _layer_weights(layer, rng)
        if layer + 1 in after:
            nodes += _excursion(after[layer + 1], nodes[-1].output[0])
            weights += _excursion_weights(after[layer + 1])
        x = nodes[-1].output[0]
    nodes.append(helper.make_node("Identity", [x], ["y"], name="last"))
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


def _excursion(index: int, x: str) -> list[onnx.NodeProto]:
    def node(kind: str, name: str, reads: list[str], *writes: str, **attributes: int) -> onnx.NodeProto:
        return helper.make_node(kind, reads, list(writes), name=f"{name}{index}", **attributes)

    high, left, right, swapped, low = (
        f"{name}{index}" for name in ("high", "left", "right", "swapped", "low")
    )
    return [
        node("Mul", "raise", [x, f"gain{index}"], f"raised{index}"),
        node("Mul", "surge", [f"raised{index}", f"more_gain{index}"], high),
        node("Split", "halve", [high, f"halves{index}"], left, right, axis=1),
        node("Concat", "swap", [right, left], swapped, axis=1),
        node("Mul", "lower", [swapped, f"loss{index}"], low),
        node("Mul", "settle", [low, f"more_loss{index}"], f"settled{index}"),
    ]


def _excursion_weights(index: int) -> list[onnx.TensorProto]:
    # One constant per node: the converter casts a constant that kept nodes share once for each, by one name.
    scales = {"gain": GAIN, "more_gain": GAIN, "loss": LOSS, "more_loss": LOSS}
    halves = np.array([WIDTH // 2, WIDTH // 2], np.int64)
    return [
        *(tensor(f"{name}{index}", np.float32(scale)) for name, scale in scales.items()),
        tensor(f"halves{index}", halves),
    ]
