"""Models that a precision breaks in a few places only: float16 beyond 65504, int8 where ranges are wide."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from tests.builders import parse

WIDTH = 32

_SCALES = {"gain": 1000.0, "more_gain": 1000.0, "loss": 0.001, "more_loss": 0.001}


def overflowing_net() -> onnx.ModelProto:
    """`x` [batch, 32] through 32 MatMul, Add and Relu, and an excursion beyond 65504, to `y`, of about 1.

    Of some 100 nodes, float16 breaks four of the excursion: it takes its input to about 1e6, swaps the halves
    of each row, and comes back. What it needs the swap for: the CPU provider computes Mul in float32 whatever
    the model says, and so does a lone float16 kernel between two such nodes; only what passes between two
    float16 kernels, here Split and Concat, is really float16.
    """
    rng, nodes, x = np.random.default_rng(0), [], "x"
    weights: dict[str, Any] = {name: np.float32(scale) for name, scale in _SCALES.items()}
    weights |= {"halves": np.array([WIDTH // 2, WIDTH // 2], np.int64)}
    for layer in range(32):
        weights[f"w{layer}"] = rng.normal(0, (2 / WIDTH) ** 0.5, (WIDTH, WIDTH)).astype(np.float32)
        weights[f"b{layer}"] = rng.normal(0, 0.1, WIDTH).astype(np.float32)
        nodes.append(
            f"[matmul{layer}] p{layer} = MatMul({x}, w{layer}) "
            f"[add{layer}] s{layer} = Add(p{layer}, b{layer}) [relu{layer}] h{layer} = Relu(s{layer})"
        )
        x = f"h{layer}"
        if layer == 15:
            nodes.append(_EXCURSION)
            x = "settled"
    nodes.append(f"[last] y = Identity({x})")
    return _net(nodes, weights)


def outlier_net() -> onnx.ModelProto:
    """`x` [batch, 32] through MatMul and Relu to `y`; one MatMul reads a column of 10,000 times the range."""
    rng, nodes, weights, x = np.random.default_rng(0), [], {}, "x"
    gain = np.where(np.arange(WIDTH) == 3, np.float32(1e4), np.float32(1))
    for layer in range(24):
        weight = rng.normal(0, (2 / WIDTH) ** 0.5, (WIDTH, WIDTH))
        if layer == 7:
            weight /= gain[:, None]
            weights["gain"] = gain
            nodes.append(f"[widen] wide = Mul({x}, gain)")
            x = "wide"
        weights[f"w{layer}"] = weight.astype(np.float32)
        y = "y" if layer == 23 else f"h{layer}"
        nodes.append(f"[matmul{layer}] p{layer} = MatMul({x}, w{layer}) [relu{layer}] {y} = Relu(p{layer})")
        x = y
    return _net(nodes, weights)


def _net(nodes: list[str], weights: dict[str, Any]) -> onnx.ModelProto:
    text = f"(float[batch, {WIDTH}] x) => (float[batch, {WIDTH}] y) {{ {' '.join(nodes)} }}"
    return parse(text, **weights)


_EXCURSION = """
    [raise] raised = Mul(h15, gain)
    [surge] high = Mul(raised, more_gain)
    [halve] left, right = Split <axis = 1> (high, halves)
    [swap] swapped = Concat <axis = 1> (right, left)
    [lower] low = Mul(swapped, loss)
    [settle] settled = Mul(low, more_loss)
"""
