"""What quantisation may touch: named nodes, checked requests, and the reply; for child processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import onnx
import onnx.version_converter
from onnx import helper

from ortprep.errors import require_known
from ortprep.spec.conversion import QuantizeSpec
from ortprep.stages.convert.pass_records import PassReply
from ortprep.stages.convert.weights import read_graph
from ortprep.stages.core.graphs.graph_walk import name_nodes, walk_graphs

CONTRIB = "com.microsoft"
PLAIN_DOMAINS = ("", "ai.onnx")
"""How models spell the domain of ONNX's own operators."""


def read_checked_graph(
    source: Path, quantize: QuantizeSpec, supported: Collection[str]
) -> tuple[onnx.ModelProto, list[tuple[str, str]]]:
    """Reads a model whose nodes then have names, and whose large tensors refer to files.

    Args:
        source: The model.
        quantize: The spec's section: operators and nodes that it names must exist.
        supported: Operator types that the pass can quantise.

    Returns:
        The model, and name and operator of every node, subgraphs included, in topological order.

    Raises:
        SpecError: A node or an operator type is unknown; the nearest name is suggested.
        StageError: The source is not an ONNX model.
    """
    for operator in quantize.operators:
        require_known("operator to quantise", operator, sorted(supported))
    model = read_graph(source)
    name_nodes(model)
    for graph in walk_graphs(model):
        # PyTorch writes shapes of weights. The quantiser transposes the weight of a Gemm under its name and
        # leaves the old shape standing, which shape inference then refuses.
        held = {tensor.name for tensor in graph.initializer}
        for value in [value for value in graph.value_info if value.name in held]:
            graph.value_info.remove(value)
    nodes = [(node.name, node.op_type) for graph in walk_graphs(model) for node in graph.node]
    for name in quantize.exclude:
        require_known("node to exclude", name, [name for name, _ in nodes])
    return model, nodes


def is_plain_gemm(node: onnx.NodeProto) -> bool:
    """Whether a Gemm equals a MatMul, by a weight that may be transposed, and an Add."""
    factors = (read_attribute(node, name, 1.0) for name in ("alpha", "beta"))
    return all(factor == 1.0 for factor in factors) and not read_attribute(node, "transA", 0)


def read_attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    """Returns a number that a node has as attribute, or the default."""
    values = [helper.get_attribute_value(item) for item in node.attribute if item.name == name]
    return values[0] if values else default


def describe_result(
    nodes: Sequence[tuple[str, str]], *, operators: Collection[str], quantized: Collection[str]
) -> PassReply:
    """Returns the reply of a pass, given the name and operator of every node of the source."""
    converted = tuple(name for name, _ in nodes if name in quantized)
    kept = tuple(name for name, operator in nodes if operator in operators and name not in quantized)
    return PassReply(nodes=len(converted) + len(kept), converted=converted, kept=kept)
