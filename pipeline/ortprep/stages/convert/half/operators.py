"""The operators that the installed ONNX Runtime knows, and the element types that they take and give.

For child processes: imports ONNX Runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import onnx
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from ortprep.errors import StageError


class Operators:
    """Schemas of a model's operators, at the versions that it imports.

    A schema's formal parameters have `typeStr` (a type, or the name of a type variable), `types` (those
    allowed, as ONNX Runtime spells them: `tensor(float)`), and `isHomogeneous`.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
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
        return _pair(list(node.input), self.schema(node).inputs)

    def outputs(self, node: onnx.NodeProto) -> list[tuple[int, str, Any]]:
        """Returns index, value and formal parameter of every output that is there."""
        return _pair(list(node.output), self.schema(node).outputs)


def is_operator(name: str) -> bool:
    """Returns whether ONNX Runtime has an operator of that name, in any domain."""
    return any(operator == name for _, operator in _schemas())


def _pair(values: list[str], formals: list[Any]) -> list[tuple[int, str, Any]]:
    return [(i, value, formals[min(i, len(formals) - 1)]) for i, value in enumerate(values) if value]


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


@functools.cache
def _schemas() -> Mapping[tuple[str, str], Mapping[int, Any]]:
    """Every schema, by domain and operator, then by the first opset it is for."""
    schemas: dict[tuple[str, str], dict[int, Any]] = {}
    for schema in get_all_operator_schema():
        schemas.setdefault((schema.domain, schema.name), {})[schema.since_version] = schema
    return schemas
