"""Bounds of integer inputs that pick rows of a table.

Seeded inputs have to stay inside: ONNX Runtime refuses an index outside its table, and only the graph knows
which table an input ends up indexing. For child processes: it reads `onnx` messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

from ortprep.stages.core.graphs.graph_walk import subgraphs

_INTEGERS = frozenset(
    TensorProto.DataType.Value(f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)
)

_FIRST = """
    Cast CastLike Compress DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reshape
    ReverseSequence Slice SpaceToDepth Split Squeeze Tile TopK Transpose Trilu Unsqueeze
"""
_CARRIED = {
    **dict.fromkeys(_FIRST.split(), (0,)),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "Where": (1, 2),
}
"""Operators whose output holds values of these inputs, unchanged."""

_MAX_ORIGINS = 64
"""Maximum number of inputs that one value is followed back to; each value keeps a set of them."""

_SAME_SHAPE = frozenset({"Cast", "DequantizeLinear", "Identity"})

_EMBED = ((0, 2), (1, 4), (8, 3))
"""EmbedLayerNormalization (com.microsoft): input of indices, input of the table."""


@dataclass
class _Scope:
    """Facts about the values that a graph can see."""

    origins: dict[str, frozenset[str]] = field(default_factory=dict)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def origins_of(self, names: Iterable[str]) -> frozenset[str]:
        """Returns the inputs whose values these have; none where they are more than `_MAX_ORIGINS`."""
        known = {self.origins[name] for name in names if name in self.origins}
        if len(known) <= 1:
            return next(iter(known), frozenset())  # the same object, however many nodes pass it on
        union = frozenset[str]().union(*known)
        return union if len(union) <= _MAX_ORIGINS else frozenset()


def find_index_bounds(graph: onnx.GraphProto) -> Mapping[str, int]:
    """Returns the exclusive upper bound of integer inputs that index a table of known size.

    Follows an input through operators that only move or convert values, into subgraphs too, to the `indices`
    of Gather and its relatives. Where an input indexes several tables the smallest counts.
    """
    held = {tensor.name for tensor in graph.initializer}
    names = [
        item.name
        for item in graph.input
        if item.name not in held and item.type.tensor_type.elem_type in _INTEGERS
    ]
    scope = _Scope({name: frozenset({name}) for name in names})
    bounds: dict[str, int] = {}
    _follow(graph, scope, bounds)
    return {name: bounds[name] for name in names if name in bounds}


def _follow(graph: onnx.GraphProto, scope: _Scope, bounds: dict[str, int]) -> None:
    scope.sizes.update({tensor.name: tuple(tensor.dims) for tensor in graph.initializer})
    scope.sizes.update({sparse.values.name: tuple(sparse.dims) for sparse in graph.sparse_initializer})
    for node in graph.node:
        for indices, bound in _lookups(node, scope.sizes):
            for name in scope.origins.get(indices, frozenset()):
                bounds[name] = min(bound, bounds.get(name, bound))
        _carry(node, scope)
        for inner in subgraphs(node):
            _follow(inner, _Scope(dict(scope.origins), dict(scope.sizes)), bounds)


def _carry(node: onnx.NodeProto, scope: _Scope) -> None:
    if node.op_type in ("Concat", "Max", "Min"):
        carried = list(node.input)
    else:
        carried = [node.input[i] for i in _CARRIED.get(node.op_type, ()) if i < len(node.input)]
    origins = scope.origins_of(carried)
    for output in node.output:
        if origins:
            scope.origins[output] = origins
    for output in node.output[:1]:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    scope.sizes[output] = tuple(attribute.t.dims)
        elif node.op_type in _SAME_SHAPE and _input(node, 0) in scope.sizes:
            scope.sizes[output] = scope.sizes[_input(node, 0)]


def _lookups(node: onnx.NodeProto, sizes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    """Returns the values that a node takes as indices, each with the bound that its table sets."""
    if node.op_type == "EmbedLayerNormalization":
        pairs = [(_input(node, indices), sizes.get(_input(node, table))) for indices, table in _EMBED]
        return [(indices, size[0]) for indices, size in pairs if indices and size]
    size = sizes.get(_input(node, 0))
    if not size:
        return []
    if node.op_type in ("Gather", "GatherElements", "GatherBlockQuantized"):
        axis = _integer(node, "gather_axis" if node.op_type == "GatherBlockQuantized" else "axis")
        return [(_input(node, 1), size[axis])] if -len(size) <= axis < len(size) else []
    if node.op_type == "GatherND":
        # How many leading axes are indexed depends on the indices' shape; the smallest of all is safe.
        rest = size[_integer(node, "batch_dims") :]
        return [(_input(node, 1), min(rest))] if rest else []
    return []


def _input(node: onnx.NodeProto, position: int) -> str:
    return node.input[position] if position < len(node.input) else ""


def _integer(node: onnx.NodeProto, attribute: str) -> int:
    return next((int(item.i) for item in node.attribute if item.name == attribute), 0)
