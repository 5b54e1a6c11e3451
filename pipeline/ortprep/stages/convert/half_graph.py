"""A graph as the conversion to half precision takes it: plain, and with the element type of every value.

`onnx.shape_inference` knows the operators of ONNX only and stops at the first of ONNX Runtime's own; the
schemas of ONNX Runtime have both. Types are spelled as ONNX Runtime does: `tensor(float)`,
`seq(tensor(int64))`. For child processes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from ortprep.errors import StageError
from ortprep.stages.core.graphs.graph_walk import defined_names, new_name, subgraphs, walk_graphs

FLOAT = "tensor(float)"

_LISTED_INITIALIZERS_BEFORE_IR = 4
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype", "stash_type")


class Operators:
    """Schemas of a model's operators, at the versions that it imports.

    A schema's formal parameters have `typeStr` (a type, or the name of a type variable), `types` (those
    allowed), and `isHomogeneous`.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        """Takes the opsets of a model."""
        self._versions = {_domain(opset.domain): opset.version for opset in model.opset_import}

    def schema(self, node: onnx.NodeProto) -> Any:
        """Returns the schema of a node's operator.

        Raises:
            StageError: ONNX Runtime has no such operator.
        """
        domain = _domain(node.domain)
        version = self._versions.get(domain, 1)
        versions = _schemas().get((domain, node.op_type), {})
        since = max((first for first in versions if first <= version), default=None)
        if since is None:
            raise StageError(
                f"unknown operator: node {node.name!r}\n  expected an operator of ONNX Runtime, "
                f"got {domain or 'ai.onnx'}::{node.op_type} of opset {version}"
            )
        return versions[since]

    def inputs(self, node: onnx.NodeProto) -> list[tuple[int, str, Any]]:
        """Returns index, value and formal parameter of every input that is there."""
        return _pair(node.input, self.schema(node).inputs)

    def outputs(self, node: onnx.NodeProto) -> list[tuple[int, str, Any]]:
        """Returns index, value and formal parameter of every output that is there."""
        return _pair(node.output, self.schema(node).outputs)


def is_operator(name: str) -> bool:
    """Returns whether ONNX Runtime has an operator of that name, in any domain."""
    return any(operator == name for _, operator in _schemas())


def _pair(values: Sequence[str], formals: list[Any]) -> list[tuple[int, str, Any]]:
    return [(i, value, formals[min(i, len(formals) - 1)]) for i, value in enumerate(values) if value]


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


@functools.cache
def _schemas() -> Mapping[tuple[str, str], Mapping[int, Any]]:
    """Returns every schema, by domain and operator, then by the first opset it is for."""
    schemas: dict[tuple[str, str], dict[int, Any]] = {}
    for schema in get_all_operator_schema():
        schemas.setdefault((schema.domain, schema.name), {})[schema.since_version] = schema
    return schemas


def make_plain(model: onnx.ModelProto) -> None:
    """Makes float32 constants initializers, and gives every value a name that no other graph has.

    ONNX Runtime does the same when it loads a model, so no answer changes. External weights stay where they
    are.

    Args:
        model: A model without functions of its own, changed in place.
    """
    for graph in walk_graphs(model):
        for position in range(len(graph.node) - 1, -1, -1):
            tensor = _constant(graph.node[position])
            if tensor is not None:
                tensor.name = graph.node[position].output[0]
                graph.initializer.append(tensor)
                del graph.node[position]
    # Inputs that initializers fill go, so that the interface lists real inputs only.
    model.ir_version = max(model.ir_version, _LISTED_INITIALIZERS_BEFORE_IR)
    filled = {tensor.name for tensor in model.graph.initializer}
    for value in [value for value in model.graph.input if value.name in filled]:
        model.graph.input.remove(value)
    _rename_below(model.graph, {}, set())


def _constant(node: onnx.NodeProto) -> TensorProto | None:
    """Returns what a Constant node of float32 holds, None for another node."""
    if node.op_type != "Constant" or _domain(node.domain):
        return None
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT:
            return attribute.t
        if attribute.name in ("value_float", "value_floats"):
            value = onnx.helper.get_attribute_value(attribute)
            return numpy_helper.from_array(np.asarray(value, np.float32))
    return None


def _rename_below(graph: onnx.GraphProto, outer: Mapping[str, str], used_names: set[str]) -> None:
    """Renames values of a graph and its subgraphs until no two graphs share a name.

    Branches may use one name for different values, for neither sees the other's.
    """
    names = {**outer}
    for name in dict.fromkeys(defined_names(graph)):
        names[name] = new_name(name, used_names)
    for value in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = names[sparse.values.name]
    for node in graph.node:
        for ends in (node.input, node.output):
            ends[:] = [names.get(name, name) for name in ends]
        for body in subgraphs(node):
            _rename_below(body, names, used_names)


def infer_value_types(model: onnx.ModelProto, operators: Operators) -> dict[str, str]:
    """Infers the type of every value of a plain model, those within subgraphs included.

    Raises:
        StageError: An operator is unknown, or a type cannot be inferred.
    """
    known = model
    with contextlib.suppress(onnx.shape_inference.InferenceError):  # what is declared has to do then
        known = onnx.shape_inference.infer_shapes(model)
    values = (value for graph in walk_graphs(known) for value in (*graph.value_info, *graph.output))
    declared = {value.name: kind for value in values if (kind := _type_of(value.type))}
    types: dict[str, str] = {}
    _infer_below(model.graph, operators, declared, types)
    return types


def _infer_below(
    graph: onnx.GraphProto, operators: Operators, declared: Mapping[str, str], types: dict[str, str]
) -> None:
    """Adds the types of a graph's values; those of a loop's inputs are there already."""
    for value in graph.input:
        types.setdefault(value.name, _type_of(value.type) or declared.get(value.name, ""))
    for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
        types[tensor.name] = f"tensor({TensorProto.DataType.Name(tensor.data_type).lower()})"
    for node in graph.node:
        formals = operators.inputs(node)
        bound = {formal.typeStr: types[value] for _, value, formal in formals if formal.isHomogeneous}
        bodies = list(subgraphs(node))
        for body in bodies:
            if node.op_type == "Loop":
                taken = ["tensor(int64)", "tensor(bool)", *(types.get(name, "") for name in node.input[2:])]
                types.update(zip((value.name for value in body.input), taken, strict=False))
            _infer_below(body, operators, declared, types)
        results = [types[value.name] for value in bodies[0].output] if bodies else []
        results = results[1:] if node.op_type == "Loop" else results
        for index, value, formal in operators.outputs(node):
            kind = _output_type(node, formal, bound, results[index : index + 1]) or declared.get(value)
            if not kind:
                raise StageError(
                    f"unknown type: value {value!r} of node {node.name!r}\n"
                    f"  expected a type from {node.op_type} or a declaration"
                )
            types[value] = kind


def _output_type(
    node: onnx.NodeProto, formal: Any, bound: Mapping[str, str], from_body: list[str]
) -> str | None:
    """Returns the type of an output by its operator's schema, the node's body or its attributes."""
    if len(formal.types) == 1:
        return str(next(iter(formal.types)))
    if next(subgraphs(node), None) is not None:
        return from_body[0] if from_body else None
    if formal.isHomogeneous and formal.typeStr in bound:
        return bound[formal.typeStr]
    for attribute in node.attribute:
        code = attribute.i if attribute.name in _TYPE_ATTRIBUTES else 0
        if attribute.name == "value" and attribute.HasField("t"):
            code = attribute.t.data_type
        if code:
            return f"tensor({TensorProto.DataType.Name(code).lower()})"
    return None


def _type_of(kind: onnx.TypeProto) -> str:
    """Returns the spelling of a declared type; empty if it is unknown."""
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        code = getattr(kind, which).elem_type
        prefix = "sparse_" if which == "sparse_tensor_type" else ""
        return f"{prefix}tensor({TensorProto.DataType.Name(code).lower()})" if code else ""
    if which in ("sequence_type", "optional_type"):
        inner = _type_of(getattr(kind, which).elem_type)
        return f"{'seq' if which == 'sequence_type' else 'optional'}({inner})" if inner else ""
    return ""
