"""The type of every value of a model's main graph, by ONNX Runtime's schemas of operators.

`onnx.shape_inference` stops at the first of ONNX Runtime's own operators; the schemas know them too. Types
are spelled as ONNX Runtime does: `tensor(float)`. For child processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

FLOAT = "tensor(float)"

Formals = list[tuple[int, str, Any]]
"""Index, value and formal parameter of every input or output that a node has.

A formal parameter has `typeStr` (a type, or the name of a type variable), `types` (those allowed), and
`isHomogeneous`.
"""


class Schemas:
    """Schemas of a model's operators, at the versions that it imports."""

    def __init__(self, model: onnx.ModelProto) -> None:
        """Takes the opsets of a model."""
        imported = {_domain(opset.domain): opset.version for opset in model.opset_import}
        self._schemas: dict[tuple[str, str], Any] = {}
        for schema in sorted(get_all_operator_schema(), key=lambda schema: schema.since_version):
            if schema.since_version <= imported.get(schema.domain, 1):
                self._schemas[schema.domain, schema.name] = schema

    def formals(self, node: onnx.NodeProto) -> tuple[Formals, Formals]:
        """Returns those of a node's inputs and outputs; none for an operator that ONNX Runtime lacks."""
        schema = self._schemas.get((_domain(node.domain), node.op_type))
        if schema is None:
            return [], []
        return _pair(node.input, schema.inputs), _pair(node.output, schema.outputs)


def _pair(values: Sequence[str], formals: list[Any]) -> Formals:
    # The last formal may stand for any number of values.
    return [(i, name, formals[min(i, len(formals) - 1)]) for i, name in enumerate(values) if name]


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def infer_value_types(model: onnx.ModelProto, schemas: Schemas) -> dict[str, str]:
    """Infers the types of the main graph's values; "" for one that is no tensor, or cannot be inferred."""
    known = model
    with contextlib.suppress(onnx.shape_inference.InferenceError):  # declared types have to do then
        known = onnx.shape_inference.infer_shapes(model)
    values = (*known.graph.input, *known.graph.value_info, *known.graph.output)
    declared = {value.name: _spell(value.type.tensor_type.elem_type) for value in values}
    types = {value.name: declared[value.name] for value in model.graph.input}
    for tensor in (*model.graph.initializer, *(each.values for each in model.graph.sparse_initializer)):
        types[tensor.name] = _spell(tensor.data_type)
    for node in model.graph.node:
        inputs, outputs = schemas.formals(node)
        bound = {formal.typeStr: types.get(name, "") for _, name, formal in inputs if formal.isHomogeneous}
        types.update((name, declared.get(name, "")) for name in node.output if name)
        for _, name, formal in outputs:
            # Else the type of a body or an attribute, which onnx infers.
            if len(formal.types) == 1:
                types[name] = str(next(iter(formal.types)))
            elif formal.isHomogeneous and formal.typeStr in bound:
                types[name] = bound[formal.typeStr] or types[name]
    return types


def _spell(code: int) -> str:
    return f"tensor({TensorProto.DataType.Name(code).lower()})" if code else ""
