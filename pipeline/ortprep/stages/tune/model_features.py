"""Features of a prepared graph that decide which knobs matter (child)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.codec import decode, encode
from ortprep.children.child import run_child
from ortprep.tuning.knobs import ModelFeatures

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


def read_features(model: Path, *, initializer_bytes: int, fixed_shapes: bool) -> ModelFeatures:
    """Reads a graph's features in a child process.

    Raises:
        ChildError: The child died.
    """
    reply = run_child(describe_features, {"model": str(model)})
    known = {"initializer_bytes": initializer_bytes, "fixed_shapes": fixed_shapes}
    return decode(ModelFeatures, reply.value | known)


def describe_features(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function of `read_features`: `model` in, the features that are in the graph out."""
    import onnx

    from ortprep.bundle.onnx_wire import read_skeleton
    from ortprep.stages.core.graphs.graph_walk import walk_nodes
    from ortprep.stages.optimize.lint import NCHWC_DOMAIN

    model = onnx.ModelProto.FromString(read_skeleton(Path(request["model"])))
    nodes = tuple(walk_nodes(model))
    return {
        "operators": encode(tuple(sorted({node.op_type for node in nodes}))),
        "width": measure_width(model.graph),
        "layout_bound": any(node.domain == NCHWC_DOMAIN for node in nodes),
        "has_1d_convolutions": _has_1d_convolutions(model.graph),
    }


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


def _has_1d_convolutions(graph: onnx.GraphProto) -> bool:
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    return any(
        node.op_type.endswith("Conv") and len(node.input) > 1 and ranks.get(node.input[1]) == 3
        for node in graph.node
    )
