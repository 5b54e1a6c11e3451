"""Which nodes compute in half precision, and which element type each value of a graph has then.

A node's operator says, by its schema, which of its float32 inputs and outputs may be of another type; a node
none of whose may, or that is asked to, stays float32. Two neighbours of different precision meet at a value
that has one type only, and that the other side casts (see `casts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnxruntime.transformers.float16 import ALWAYS_FLOAT_INPUTS

from ortprep.stages.convert.half.operators import Operators
from ortprep.stages.convert.half.rounding import HalfType
from ortprep.stages.convert.half.value_types import FLOAT
from ortprep.stages.core.graphs.graph_walk import new_name, subgraphs, value_names, walk_graphs

_BY_ATTRIBUTE = frozenset(
    ["Bernoulli", "Cast", "ConstantOfShape", "EyeLike", "RandomNormal", "RandomNormalLike", "RandomUniform"]
)
"""Operators whose output's type is an attribute that the conversion changes."""

_SIZE_BOUND = frozenset({"BitCast"})
"""Operators that look at the bits of what they are given."""


@dataclass(frozen=True)
class HalfPlan:
    """What a conversion is to do.

    Attributes:
        half: To which type.
        half_inputs: By name of node, which of its inputs it takes in half precision; of those converted only.
        eligible: Names of converted nodes that compute with floats, in order.
        kept: Names of nodes that compute with floats and stay float32, in order.
        source_types: The type of every value before.
        types: The type of every value after.
        interface: The type that outputs of graphs have to have, by name.
    """

    half: HalfType
    half_inputs: Mapping[str, frozenset[int]]
    eligible: tuple[str, ...]
    kept: tuple[str, ...]
    source_types: Mapping[str, str]
    types: Mapping[str, str]
    interface: Mapping[str, str]


def plan_half(
    model: onnx.ModelProto,
    source_types: Mapping[str, str],
    half: HalfType,
    *,
    keep_io: bool,
    must_stay: Callable[[onnx.NodeProto], bool],
) -> HalfPlan:
    """Plans the conversion of a model that `make_plain` rewrote; `source_types` has the type of every value.

    Returns:
        The plan.
    """
    planner = _Planner(Operators(model), source_types, half, must_stay)
    planner.visit(model.graph, stays=keep_io, all_stay=False)
    planner.place_initializers(model)
    return HalfPlan(
        half=half,
        half_inputs=planner.half_inputs,
        eligible=tuple(planner.eligible),
        kept=tuple(planner.kept),
        source_types=source_types,
        types=planner.types,
        interface=planner.interface,
    )


class _Planner:
    def __init__(
        self,
        operators: Operators,
        source_types: Mapping[str, str],
        half: HalfType,
        must_stay: Callable[[onnx.NodeProto], bool],
    ) -> None:
        self._operators = operators
        self._source_types = source_types
        self._half = half
        self._must_stay = must_stay
        self.half_inputs: dict[str, frozenset[int]] = {}
        self.eligible: list[str] = []
        self.kept: list[str] = []
        self.types = dict(source_types)
        self.interface: dict[str, str] = {}

    def visit(self, graph: onnx.GraphProto, *, stays: bool, all_stay: bool) -> None:
        """Plans a graph: whether its interface stays float32, and whether every node of it does."""
        for value in graph.input:
            self.types[value.name] = self._changed(value.name, changes=not stays)
        for node in graph.node:
            self._visit_node(node, stays=all_stay)
        for output in graph.output:
            self.interface[output.name] = self._changed(output.name, changes=not stays)

    def _visit_node(self, node: onnx.NodeProto, *, stays: bool) -> None:
        bodies = list(subgraphs(node))
        values = (*node.input, *node.output)
        inputs, outputs = self._convertible(node)
        stays = stays or self._must_stay(node) or any(self._holds_floats(value) for value in values)
        converted = not stays and bool(inputs or outputs)
        # A branch that gives no floats may still compute with some.
        if converted or (bodies and not stays):
            self.half_inputs[node.name] = inputs
        if converted:
            self.eligible.append(node.name)
            for index in outputs:
                self.types[node.output[index]] = self._half.kind
        elif any(self._source_types.get(value) == FLOAT for value in values):
            self.kept.append(node.name)
        for body in bodies:
            self.visit(body, stays=not converted, all_stay=stays)

    def _convertible(self, node: onnx.NodeProto) -> tuple[frozenset[int], frozenset[int]]:
        """Returns which inputs and outputs of a node may be in half precision."""
        if node.op_type in _SIZE_BOUND:
            return frozenset(), frozenset()
        floats = ALWAYS_FLOAT_INPUTS.get(node.op_type, ())
        inputs = {
            index: formal
            for index, value, formal in self._operators.inputs(node)
            if self._may_change(value, formal) and index not in floats
        }
        variables = {formal.typeStr for formal in inputs.values()}
        follows = node.op_type in _BY_ATTRIBUTE or next(subgraphs(node), None) is not None
        outputs = (
            index
            for index, value, formal in self._operators.outputs(node)
            if self._may_change(value, formal) and (follows or formal.typeStr in variables)
        )
        return frozenset(inputs), frozenset(outputs)

    def _may_change(self, value: str, formal: Any) -> bool:
        return self._source_types[value] == FLOAT and self._half.kind in formal.types

    def _holds_floats(self, value: str) -> bool:
        """Returns whether a value is a container of float32, such as a sequence; those stay."""
        kind = self._source_types.get(value, FLOAT)
        return kind != FLOAT and FLOAT in kind

    def _changed(self, value: str, *, changes: bool) -> str:
        kind = self._source_types[value]
        return self._half.kind if changes and kind == FLOAT else kind

    def place_initializers(self, model: onnx.ModelProto) -> None:
        """Sets the type of each float32 initializer: half precision if a converted node takes it so."""
        graphs = list(walk_graphs(model))
        half_values = {
            node.input[index]
            for graph in graphs
            for node in graph.node
            for index in self.half_inputs.get(node.name, ())
        }
        for tensor in (tensor for graph in graphs for tensor in graph.initializer):
            name = tensor.name
            kind = self._changed(name, changes=name in half_values)
            self.types[name] = self.interface.get(name, kind)


def split_shared(model: onnx.ModelProto, plan: HalfPlan) -> dict[str, str]:
    """Copies initializers that both float32 nodes and half-precision nodes use.

    Rounded and cast back, a weight would have lost what its node is kept for.

    Args:
        model: A plain model, changed in place; tensors may refer to files.
        plan: What is to be converted; of a changed model another one has to be made.

    Returns:
        The new initializers' names, and those that they are copies of.
    """
    in_half = {
        node.input[index]
        for graph in walk_graphs(model)
        for node in graph.node
        for index in plan.half_inputs.get(node.name, ())
    }
    used_names, copies = value_names(model), dict[str, str]()
    shared = {
        tensor.name: new_name(f"{tensor.name}_float32", used_names)
        for graph in walk_graphs(model)
        for tensor in graph.initializer
        if tensor.name in in_half and tensor.name not in plan.interface
    }
    for graph in walk_graphs(model):
        for node in graph.node:
            halves = plan.half_inputs.get(node.name, frozenset())
            for index, name in enumerate(node.input):
                if index not in halves and name in shared and plan.source_types[name] == FLOAT:
                    node.input[index] = shared[name]
                    copies[shared[name]] = name
    for graph in walk_graphs(model):
        for tensor in list(graph.initializer):
            if shared.get(tensor.name) in copies:
                graph.initializer.add().CopyFrom(tensor)
                graph.initializer[-1].name = shared[tensor.name]
    return copies
