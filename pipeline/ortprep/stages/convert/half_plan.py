"""Which nodes compute in half precision, and which element type each value of a graph has then.

A node's operator says, by its schema, which of its float32 inputs and outputs may be of another type; a node
none of whose may, or that is asked to, stays float32. Two neighbours of different precision meet at a value
that has one type only, and that the other side casts (see `half_casts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnxruntime.transformers.float16 import ALWAYS_FLOAT_INPUTS

from ortprep.stages.convert.half_graph import FLOAT, Operators, infer_value_types
from ortprep.stages.core.graphs.graph_walk import subgraphs, walk_graphs

_BY_ATTRIBUTE = frozenset(
    ["Bernoulli", "Cast", "ConstantOfShape", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform"]
)
"""Operators whose output's type is an attribute that the conversion changes."""

_SIZE_BOUND = frozenset({"BitCast"})
"""Operators that look at the bits of what they are given."""


class HalfPlan:
    """What a conversion is to do with a model that `make_plain` rewrote.

    Attributes:
        kind: The type to convert to: `tensor(float16)` or `tensor(bfloat16)`.
        half_inputs: By name of node, which of its inputs it takes in half precision; of those converted only.
        converted: Names of converted nodes that compute with floats, in order.
        kept: Names of nodes that compute with floats and stay float32, in order.
        source_types: The type of every value before.
        types: The type of every value after.
        interface: The type that outputs of graphs have to have, by name.
        weights: Names of the initializers.
    """

    def __init__(
        self, model: onnx.ModelProto, kind: str, *, keep_io: bool, must_stay: Callable[[onnx.NodeProto], bool]
    ) -> None:
        """Plans the conversion; `must_stay` says which nodes stay float32, bodies included."""
        self._operators, self._must_stay = Operators(model), must_stay
        self.kind = kind
        self.half_inputs: dict[str, frozenset[int]] = {}
        self.converted: list[str] = []
        self.kept: list[str] = []
        self.source_types = infer_value_types(model, self._operators)
        self.types = dict(self.source_types)
        self.interface: dict[str, str] = {}
        self.weights = {tensor.name for graph in walk_graphs(model) for tensor in graph.initializer}
        self._visit(model.graph, stays=keep_io, all_stay=False)
        half_values = {
            node.input[index]
            for graph in walk_graphs(model)
            for node in graph.node
            for index in self.half_inputs.get(node.name, ())
        }
        for name in self.weights:
            self.types[name] = self.interface.get(name, self._changed(name, changes=name in half_values))

    def _visit(self, graph: onnx.GraphProto, *, stays: bool, all_stay: bool) -> None:
        """Plans a graph: whether its interface stays float32, and whether every node of it does."""
        for value in graph.input:
            self.types[value.name] = self._changed(value.name, changes=not stays)
        for node in graph.node:
            self._visit_node(node, stays=all_stay)
        for output in graph.output:
            self.interface[output.name] = self._changed(output.name, changes=not stays)

    def _visit_node(self, node: onnx.NodeProto, *, stays: bool) -> None:
        bodies, kinds = list(subgraphs(node)), [self.source_types.get(v) for v in (*node.input, *node.output)]
        inputs, outputs = self._convertible(node, has_bodies=bool(bodies))
        # Containers of floats, such as sequences, stay what they are.
        holds_floats = any(kind is not None and kind != FLOAT and FLOAT in kind for kind in kinds)
        stays = stays or self._must_stay(node) or holds_floats
        converted = not stays and bool(inputs or outputs)
        # A branch that gives no floats may still compute with some.
        if converted or (bodies and not stays):
            self.half_inputs[node.name] = inputs
        if converted:
            self.converted.append(node.name)
            self.types.update((node.output[index], self.kind) for index in outputs)
        elif FLOAT in kinds:
            self.kept.append(node.name)
        for body in bodies:
            self._visit(body, stays=not converted, all_stay=stays)

    def _convertible(
        self, node: onnx.NodeProto, *, has_bodies: bool
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Returns which inputs and outputs of a node may be in half precision."""
        if node.op_type in _SIZE_BOUND:
            return frozenset(), frozenset()

        def may_change(value: str, formal: Any) -> bool:
            return self.source_types[value] == FLOAT and self.kind in formal.types

        floats = ALWAYS_FLOAT_INPUTS.get(node.op_type, ())
        inputs = {
            index: formal
            for index, value, formal in self._operators.inputs(node)
            if may_change(value, formal) and index not in floats
        }
        variables = {formal.typeStr for formal in inputs.values()}
        follows = node.op_type in _BY_ATTRIBUTE or has_bodies
        outputs = (
            index
            for index, value, formal in self._operators.outputs(node)
            if may_change(value, formal) and (follows or formal.typeStr in variables)
        )
        return frozenset(inputs), frozenset(outputs)

    def _changed(self, value: str, *, changes: bool) -> str:
        kind = self.source_types[value]
        return self.kind if changes and kind == FLOAT else kind
