"""Features of a graph that decide which plans are worth trying; for child processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_CHEAP = frozenset(
    {
        "Cast", "Concat", "Constant", "ConstantOfShape", "Expand", "Flatten", "Gather", "Identity", "Reshape",
        "Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
        "ReorderInput", "ReorderOutput",
    }
)  # fmt: skip
"""Operators that move or describe data: two of them side by side are no reason for two threads."""


def measure_width(graph: onnx.GraphProto) -> int:
    """Returns the maximum number of nodes with real work at one depth."""
    depth_of: dict[str, int] = {}
    counts: dict[int, int] = {}
    for node in graph.node:  # in topological order
        depth = max((depth_of.get(name, 0) for name in node.input), default=0)
        if node.op_type not in _CHEAP:
            depth += 1
            counts[depth] = counts.get(depth, 0) + 1
        for name in node.output:
            depth_of[name] = depth
    return max(counts.values(), default=0)


def has_1d_convolutions(graph: onnx.GraphProto) -> bool:
    """Returns whether a convolution of the main graph has a kernel of one axis."""
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    return any(
        node.op_type.endswith("Conv") and len(node.input) > 1 and ranks.get(node.input[1]) == 3
        for node in graph.node
    )
