"""A model's graph as far as the lint needs it: names, operators, where weights are; never their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

_EXTERNAL = 1  # TensorProto.DataLocation


@dataclass(frozen=True)
class NodeDescription:
    """A node of the graph, of a subgraph, or of a function of the model.

    Attributes:
        name: Its name, or its first output's where it has none.
        domain: Operator domain, "" for ai.onnx.
        operator: Operator type.
    """

    name: str
    domain: str
    operator: str

    @property
    def kind(self) -> str:
        """Its operator as `SourceRecord.operators` has it: `domain.Type`, `Type` in ai.onnx."""
        return f"{self.domain}.{self.operator}" if self.domain else self.operator


@dataclass(frozen=True)
class ExternalReference:
    """A tensor whose values are in another file.

    Attributes:
        tensor: Name of the tensor.
        location: The file, as the model gives it.
        offset: First byte of the values.
        length: Their number of bytes, by the model or, where that is more, by the tensor's shape.
    """

    tensor: str
    location: str
    offset: int
    length: int


@dataclass(frozen=True)
class GraphDescription:
    """What is known of a model without its weights.

    Attributes:
        ir_version: ONNX IR version.
        opsets: Opset version by domain ("" is ai.onnx).
        nodes: All nodes, at every depth.
        values: Names of all inputs, outputs, initializers and intermediate values, at every depth.
        external: All external references, at every depth.
        inputs: Names of the main graph's inputs that are no initializers.
        outputs: Names of the main graph's outputs.
        local_functions: (domain, name) of the functions the model itself defines.
    """

    ir_version: int
    opsets: Mapping[str, int]
    nodes: tuple[NodeDescription, ...]
    values: frozenset[str]
    external: tuple[ExternalReference, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    local_functions: frozenset[tuple[str, str]] = frozenset()

    @property
    def domains(self) -> frozenset[str]:
        """Domains of the operators that are used; those of the model's own functions do not count."""
        return frozenset(node.domain for node in self.operators)

    @property
    def operators(self) -> tuple[NodeDescription, ...]:
        """The nodes that call no function of the model's own."""
        return tuple(node for node in self.nodes if (node.domain, node.operator) not in self.local_functions)


def describe_graph(model: onnx.ModelProto) -> GraphDescription:
    """Describes a model, whose weights need not be loaded; for child processes, since it imports onnx."""
    from ortprep.stages.core.graphs.graph_walk import walk_graphs, walk_nodes, walk_tensors

    nodes = tuple(walk_nodes(model))
    tensors = tuple(walk_tensors(model))
    held = {tensor.name for tensor in model.graph.initializer}
    held |= {sparse.values.name for sparse in model.graph.sparse_initializer}
    values = {name for node in nodes for name in (*node.input, *node.output)}
    values |= {value.name for graph in walk_graphs(model) for value in (*graph.input, *graph.output)}
    return GraphDescription(
        ir_version=model.ir_version,
        opsets={_domain(entry.domain): entry.version for entry in model.opset_import},
        nodes=tuple(
            NodeDescription(node.name or next(iter(node.output), ""), _domain(node.domain), node.op_type)
            for node in nodes
        ),
        values=frozenset(values | {tensor.name for tensor in tensors}) - {""},
        external=tuple(_describe_reference(t) for t in tensors if t.data_location == _EXTERNAL),
        inputs=tuple(value.name for value in model.graph.input if value.name not in held),
        outputs=tuple(value.name for value in model.graph.output),
        local_functions=frozenset((_domain(function.domain), function.name) for function in model.functions),
    )


def _describe_reference(tensor: onnx.TensorProto) -> ExternalReference:
    from ortprep.stages.core.graphs.graph_walk import values_bytes

    entries = {entry.key: entry.value for entry in tensor.external_data}
    return ExternalReference(
        tensor=tensor.name,
        location=entries.get("location", ""),
        offset=_parse_count(entries.get("offset", "0")),
        length=max(_parse_count(entries.get("length", "0")), values_bytes(tensor)),
    )


def _parse_count(text: str) -> int:
    """Reads a byte count; anything else becomes a number that no file holds, for the lint to find."""
    return int(text) if text.isdecimal() and len(text) < 20 else 1 << 63


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain
