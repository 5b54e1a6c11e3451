"""Element types of all values of a graph, by the schemas of its operators.

`onnx.shape_inference` knows the operators of ONNX only and stops at the first of ONNX Runtime's own; schemas
are there for both. Types are spelled as ONNX Runtime does: `tensor(float)`, `seq(tensor(int64))`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from onnx import TensorProto

from ortprep.errors import StageError
from ortprep.stages.convert.half.operators import Operators
from ortprep.stages.core.graphs.graph_walk import subgraphs, walk_graphs

FLOAT = "tensor(float)"

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype", "stash_type")


def infer_value_types(model: onnx.ModelProto, declared: Mapping[str, str]) -> dict[str, str]:
    """Infers the type of every value.

    Args:
        model: A model whose values have names of their own throughout (see `plain_graph`), nodes in order.
        declared: Types of values whose nodes' schemas leave open.

    Returns:
        The types by name of value, those within subgraphs included.

    Raises:
        StageError: An operator is unknown, or a type cannot be inferred.
    """
    inference = _Inference(Operators(model), declared)
    inference.run(model.graph)
    return inference.types


def declared_types(model: onnx.ModelProto) -> dict[str, str]:
    """Returns the types that a model declares, or that `onnx.shape_inference` finds; not of every value."""
    with contextlib.suppress(onnx.shape_inference.InferenceError):  # what is declared has to do then
        model = onnx.shape_inference.infer_shapes(model)
    values = (value for graph in walk_graphs(model) for value in (*graph.value_info, *graph.output))
    return {value.name: kind for value in values if (kind := _type_of(value.type))}


def type_name(code: int) -> str:
    """Returns the type of a tensor by the number of its element type."""
    return f"tensor({TensorProto.DataType.Name(code).lower()})"


class _Inference:
    def __init__(self, operators: Operators, declared: Mapping[str, str]) -> None:
        self._operators = operators
        self._declared = declared
        self.types: dict[str, str] = {}

    def run(self, graph: onnx.GraphProto) -> None:
        for value in graph.input:
            self.types.setdefault(value.name, _type_of(value.type) or self._declared.get(value.name, ""))
        for tensor in graph.initializer:
            self.types[tensor.name] = type_name(tensor.data_type)
        for sparse in graph.sparse_initializer:
            self.types[sparse.values.name] = type_name(sparse.values.data_type)
        for node in graph.node:
            self._run_node(node)

    def _run_node(self, node: onnx.NodeProto) -> None:
        bound = self._bind(node)
        bodies = list(subgraphs(node))
        for body in bodies:
            self._enter(node, body)
            self.run(body)
        for index, value, formal in self._operators.outputs(node):
            kind = self._output_type(node, index, formal, bound, bodies) or self._declared.get(value)
            if not kind:
                raise StageError(
                    f"unknown type: value {value!r} of node {node.name!r}\n"
                    f"  expected a type from {node.op_type} or a declaration"
                )
            self.types[value] = kind

    def _bind(self, node: onnx.NodeProto) -> dict[str, str]:
        """Returns what a node's type variables stand for."""
        return {
            formal.typeStr: self.types[value]
            for _, value, formal in self._operators.inputs(node)
            if formal.isHomogeneous
        }

    def _enter(self, node: onnx.NodeProto, body: onnx.GraphProto) -> None:
        """Sets the input types of a loop's body."""
        if node.op_type == "Loop":
            kinds = ["tensor(int64)", "tensor(bool)", *(self.types.get(name, "") for name in node.input[2:])]
            for value, kind in zip(body.input, kinds, strict=False):
                self.types[value.name] = kind

    def _output_type(
        self,
        node: onnx.NodeProto,
        index: int,
        formal: Any,
        bound: Mapping[str, str],
        bodies: list[onnx.GraphProto],
    ) -> str | None:
        if len(formal.types) == 1:
            return str(next(iter(formal.types)))
        if bodies:
            results = bodies[0].output[1:] if node.op_type == "Loop" else bodies[0].output
            return self.types[results[index].name] if index < len(results) else None
        if formal.isHomogeneous and formal.typeStr in bound:
            return bound[formal.typeStr]
        return next(_stated(node), None)


def _stated(node: onnx.NodeProto) -> Iterator[str]:
    for attribute in node.attribute:
        if attribute.name in _TYPE_ATTRIBUTES and attribute.i:
            yield type_name(attribute.i)
        elif attribute.name == "value" and attribute.HasField("t"):
            yield type_name(attribute.t.data_type)


def _type_of(kind: onnx.TypeProto) -> str:
    """Returns the spelling of a declared type; empty if it is unknown."""
    which = kind.WhichOneof("value")
    if which == "tensor_type":
        return type_name(kind.tensor_type.elem_type) if kind.tensor_type.elem_type else ""
    if which == "sparse_tensor_type":
        return f"sparse_{type_name(kind.sparse_tensor_type.elem_type)}"
    if which in ("sequence_type", "optional_type"):
        inner = _type_of(getattr(kind, which).elem_type)
        return f"{'seq' if which == 'sequence_type' else 'optional'}({inner})" if inner else ""
    return ""
