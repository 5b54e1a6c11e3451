"""Reads what of a prepared graph decides which knobs matter (child)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.bundle.codec import decode, encode
from pipeline.runtime.child import run_child
from pipeline.tuning.knobs import ModelTraits

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


def read_traits(model: Path, *, initializer_bytes: int, fixed_shapes: bool) -> ModelTraits:
    """Reads a graph's traits in a child process.

    Args:
        model: The prepared model.
        initializer_bytes: Size of its weights.
        fixed_shapes: Whether jobs send one set of shapes only.

    Raises:
        ChildError: The child died.
    """
    reply = run_child("pipeline.stages.tune.traits:describe_traits", {"model": str(model)})
    traits = decode(ModelTraits, reply.value | {"initializer_bytes": 0, "fixed_shapes": fixed_shapes})
    return replace(traits, initializer_bytes=initializer_bytes)


def describe_traits(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function of `read_traits`: `model` in, the traits that are in the graph out."""
    import onnx

    from pipeline.bundle.onnx_wire import read_skeleton
    from pipeline.stages.graphs.graph_walk import walk_nodes
    from pipeline.stages.optimize.lint import NCHWC_DOMAIN

    model = onnx.ModelProto.FromString(read_skeleton(Path(request["model"])))
    nodes = tuple(walk_nodes(model))
    return {
        "operators": encode(tuple(sorted({node.op_type for node in nodes}))),
        "width": measure_width(model.graph),
        "layout_bound": any(node.domain == NCHWC_DOMAIN for node in nodes),
        "has_1d_convolutions": _has_1d_convolutions(model.graph),
    }


def measure_width(graph: onnx.GraphProto) -> int:
    """Returns how many nodes with real work stand at the same depth, at most: what could run side by side."""
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
