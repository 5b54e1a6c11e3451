"""Bounds of integer inputs that pick rows of a table.

Seeded inputs have to stay inside: ONNX Runtime refuses an index outside its table, and only the graph knows
which table an input ends up indexing. For child processes: it reads `onnx` messages.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

import onnx
from onnx import TensorProto

from ortprep.stages.core.graph_walk import subgraphs

PASSED_ON = frozenset(
    {
        "Cast", "Clip", "Concat", "Expand", "Flatten", "Identity", "Pad", "Reshape", "Resize", "Slice",
        "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators whose first output has values of their first input."""

_SAME_SHAPE = frozenset({"Cast", "DequantizeLinear", "Identity"})
_LOOKUPS = frozenset({"Gather", "GatherElements"})
_INTEGERS = frozenset(
    TensorProto.DataType.Value(f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)
)


def find_index_bounds(graph: onnx.GraphProto) -> Mapping[str, int]:
    """Returns the exclusive upper bound of integer inputs that index a table of known size.

    Follows an input through operators that only move or convert values, into subgraphs too, to the `indices`
    of Gather and GatherElements. Where an input indexes several tables the smallest counts.
    """
    held = {tensor.name for tensor in graph.initializer}
    origins = {
        item.name: item.name
        for item in graph.input
        if item.name not in held and item.type.tensor_type.elem_type in _INTEGERS
    }
    bounds: dict[str, int] = {}
    _follow(graph, ChainMap(origins), ChainMap(), bounds)
    return bounds


def _follow(
    graph: onnx.GraphProto,
    origins: ChainMap[str, str],
    tables: ChainMap[str, tuple[int, ...]],
    bounds: dict[str, int],
) -> None:
    """Adds a graph's bounds, given the input that each value comes from, and the shape of each table."""
    tables.update((tensor.name, tuple(tensor.dims)) for tensor in graph.initializer)
    for node in graph.node:
        first, second = (*node.input, "", "")[:2]
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type in _LOOKUPS and second in origins and first in tables:
            size, axis = tables[first], int(attributes["axis"].i) if "axis" in attributes else 0
            if -len(size) <= axis < len(size):
                name = origins[second]
                bounds[name] = min(size[axis], bounds.get(name, size[axis]))
        for output in node.output[:1]:
            if node.op_type == "Constant" and "value" in attributes:
                tables[output] = tuple(attributes["value"].t.dims)
            if node.op_type in PASSED_ON and first in origins:
                origins[output] = origins[first]
            if node.op_type in _SAME_SHAPE and first in tables:
                tables[output] = tables[first]
        for inner in subgraphs(node):
            # What a branch names, no other sees. A copy for each would take the square of the model's size.
            _follow(inner, origins.new_child(), tables.new_child(), bounds)
