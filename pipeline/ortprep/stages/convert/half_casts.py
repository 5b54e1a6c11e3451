"""Casts where float32 meets half precision, one for each value and type, and no others.

`convert_float_to_float16` has casts of its own, put round every node it was told to keep. Its graphs do not
load where two such nodes take the same value ("two nodes with same node name", seen with 1.31.1) or where one
is in a subgraph, and between two neighbours it casts to half precision and back, which loses the range that
they were kept for. Here a value has the type its node gives it, and is cast only for those who want another.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import TensorProto, helper

from ortprep.stages.convert.half_graph import FLOAT
from ortprep.stages.convert.half_plan import HalfPlan
from ortprep.stages.core.graphs.graph_walk import new_name, value_names, walk_graphs


def insert_casts(model: onnx.ModelProto, plan: HalfPlan) -> dict[str, str]:
    """Connects nodes by values of the types they take, and gives values and interfaces theirs.

    Args:
        model: The model, changed in place; its weights keep their values and types.
        plan: What is converted.

    Returns:
        Float32 weights to add, with the names of those in half precision that they are copies of: rounded and
        cast back, a weight would have lost what its node is kept for.
    """
    casts = _CastInsertion(model, plan)
    graphs = list(walk_graphs(model))
    for graph in graphs:
        casts.rename_outputs(graph)
    for graph in graphs:
        casts.connect(graph)
    for graph in graphs:
        casts.place_casts(graph)
        casts.declare(graph)
    return casts.copies


class _CastInsertion:
    def __init__(self, model: onnx.ModelProto, plan: HalfPlan) -> None:
        half = plan.kind.removeprefix("tensor(").removesuffix(")")
        self._plan = plan
        self._codes = {FLOAT: TensorProto.FLOAT, plan.kind: TensorProto.DataType.Value(half.upper())}
        self._suffixes = {FLOAT: "float32", plan.kind: half}
        self._used_names = value_names(model)
        self._node_names = {node.name for graph in walk_graphs(model) for node in graph.node}
        # What a value is called where it is made; and what it is called as another type.
        self._renamed: dict[str, str] = {}
        self._casts: dict[str, dict[str, str]] = {}
        # Outputs of casts that change nothing any more, and what those take.
        self._same: dict[str, str] = {}
        self.copies: dict[str, str] = {}

    def rename_outputs(self, graph: onnx.GraphProto) -> None:
        """Renames outputs whose type changes, so that their casts get the original names."""
        for output in graph.output:
            kind, made = self._plan.interface[output.name], self._plan.types[output.name]
            if made != kind:
                stem = f"{output.name}_{self._suffixes[made]}"
                self._renamed[output.name] = new_name(stem, self._used_names)
                self._casts[output.name] = {kind: output.name}

    def connect(self, graph: onnx.GraphProto) -> None:
        """Connects each node of a graph to values of its types."""
        for node in graph.node:
            in_half = self._plan.half_inputs.get(node.name, frozenset())
            if self._is_redundant_cast(node):
                self._same[node.output[0]] = self._same.get(node.input[0], node.input[0])
            else:
                node.input[:] = [
                    self._take(name, half=index in in_half) for index, name in enumerate(node.input)
                ]

    def _is_redundant_cast(self, node: onnx.NodeProto) -> bool:
        """Returns whether a node casts half precision to itself; ONNX Runtime 1.27 refuses some (#29235)."""
        return (
            node.op_type == "Cast"
            and node.output[0] not in self._plan.interface
            and self._plan.types[node.input[0]] == self._plan.types[node.output[0]] == self._plan.kind
        )

    def _take(self, value: str, *, half: bool) -> str:
        """Returns the name of a value in the type that its user takes."""
        if not value:
            return value
        kind = self._plan.kind if half else self._plan.source_types[value]
        value = self._same.get(value, value)
        if self._plan.types[value] == kind:
            return self._renamed.get(value, value)
        casts = self._casts.setdefault(value, {})
        if kind not in casts:
            casts[kind] = new_name(f"{value}_{self._suffixes[kind]}", self._used_names)
            if value in self._plan.weights and value not in self._plan.interface:
                self.copies[casts[kind]] = value
        return casts[kind]

    def place_casts(self, graph: onnx.GraphProto) -> None:
        """Inserts each cast behind the node that makes its value."""
        values = [value.name for value in (*graph.input, *graph.initializer)]
        values += [sparse.values.name for sparse in graph.sparse_initializer]
        for tensor in graph.initializer:
            tensor.name = self._renamed.get(tensor.name, tensor.name)
        for position in range(len(graph.node) - 1, -1, -1):
            node = graph.node[position]
            outputs = list(node.output)
            if outputs and outputs[0] in self._same:
                del graph.node[position]
                continue
            node.output[:] = [self._renamed.get(name, name) for name in outputs]
            self._insert_at(graph, position + 1, outputs)
        self._insert_at(graph, 0, values)

    def _insert_at(self, graph: onnx.GraphProto, position: int, values: Iterable[str]) -> None:
        """Inserts the casts of values that are made before a position."""
        for value in values:
            for kind, name in self._casts.get(value, {}).items():
                if name not in self.copies:
                    cast = helper.make_node("Cast", [self._renamed.get(value, value)], [name])
                    cast.attribute.append(helper.make_attribute("to", self._codes[kind]))
                    cast.name = new_name(f"{name}_cast", self._node_names)
                    graph.node.insert(position, cast)
                    position += 1

    def declare(self, graph: onnx.GraphProto) -> None:
        """Updates the declared types of a graph's values and interface."""
        for output in graph.output:
            self._set_type(output, self._plan.interface[output.name])
        for value in (*graph.input, *graph.value_info):
            if value.name in self._plan.types:
                self._set_type(value, self._plan.types[value.name])
        described = onnx.GraphProto(value_info=[v for v in graph.value_info if v.name not in self._same])
        for value in described.value_info:
            value.name = self._renamed.get(value.name, value.name)
        del graph.value_info[:]
        graph.value_info.extend(described.value_info)

    def _set_type(self, value: onnx.ValueInfoProto, kind: str) -> None:
        if kind in self._codes:
            value.type.tensor_type.elem_type = self._codes[kind]
