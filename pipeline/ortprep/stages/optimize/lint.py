"""Hazards of graphs that ONNX Runtime writes, which a load in a fresh process does not always show.

An `error` means that the graph is not used and the next step is tried, a `requirement` that it binds the
variant to a kind of machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortprep.bundle.manifest import LintFinding
from ortprep.stages.core.contract import PORTABLE

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

ERROR, REQUIREMENT = "error", "requirement"

NCHWC_DOMAIN = "com.microsoft.nchwc"
INTERNAL_NHWC_DOMAIN = "com.ms.internal.nhwc"
ONNX_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml"})
COPY_OPERATORS = frozenset({"MemcpyFromHost", "MemcpyToHost"})
PROVIDER_SUFFIX = re.compile(r"_[A-Za-z]+ExecutionProvider$")

_NodeRule = tuple[str, Callable[["NodeProto"], bool], frozenset[str], str, str]

NODE_RULES: tuple[_NodeRule, ...] = (
    # rule, which nodes, variants that they merely bind to a machine, what is said, issue of ONNX Runtime
    # No CPU session has a kernel for copies between devices, and each load adds its own.
    ("memcpy-node", lambda n: n.op_type in COPY_OPERATORS, frozenset(), "copies between devices", "#11348"),
    ("compiled-node", lambda n: n.op_type == "EPContext", frozenset(), "compiled by a provider", ""),
    # On a machine with another block size they fail, or answer wrongly without a word.
    (
        "nchwc-layout",
        lambda n: n.domain == NCHWC_DOMAIN,
        frozenset({"cpu", "cuda"}),
        "with channels in blocks that fit this processor's instruction set",
        "#26174",
    ),
    # Some providers ask for this layout while they take nodes; CPU has no kernels in its domain.
    (
        "internal-nhwc",
        lambda n: n.domain == INTERNAL_NHWC_DOMAIN,
        frozenset({"cuda"}),
        "channels last",
        "#20379",
    ),
)


@dataclass(frozen=True)
class LintContext:
    """Facts that a graph is judged against.

    Attributes:
        variant: `cpu`, `cuda` or `portable`.
        source_operators: Operators that the source model uses itself, as `SourceRecord.operators` has them.
        inputs: Names of the source's inputs, in order.
        outputs: Names of its outputs, in order.
    """

    variant: str
    source_operators: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def lint_model(
    model: ModelProto, context: LintContext, *, data_files: Collection[str]
) -> tuple[LintFinding, ...]:
    """Returns every hazard of a model, subgraphs and functions included; for child processes.

    Args:
        model: Its weights need not be loaded.
        context: Facts that it is judged against.
        data_files: Names of the external data files that it may refer to.
    """
    return (
        *_lint_nodes(model, context),
        *_lint_names(model),
        *_lint_data(model, data_files),
        *_lint_interface(model, context),
    )


def errors_of(findings: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    """Returns the findings that forbid the graph."""
    return tuple(finding for finding in findings if finding.severity == ERROR)


def _lint_nodes(model: ModelProto, context: LintContext) -> Iterator[LintFinding]:
    """Yields a finding for each rule of nodes, and for each operator that is for some machines only."""
    from ortprep.stages.core.graph_walk import walk_operators

    operators = list(walk_operators(model))
    for rule, matches, bound, what, issue in NODE_RULES:
        nodes = [node for node in operators if matches(node)]
        if nodes:
            severity = REQUIREMENT if context.variant in bound else ERROR
            yield LintFinding(rule, severity, _name(nodes[0]), f"{_count(nodes)} {what}", issue)
    if context.variant == PORTABLE:
        beyond = [node for node in operators if node.domain not in ONNX_DOMAINS]
        for kind in sorted({_kind(node) for node in beyond}.difference(context.source_operators)):
            nodes = [node for node in beyond if _kind(node) == kind]
            detail = f"{_count(nodes)} that the source does not have"
            yield LintFinding("not-portable", ERROR, kind, detail)


def _lint_names(model: ModelProto) -> Iterator[LintFinding]:
    """Values named after an execution provider: ONNX Runtime gives such names when it places nodes again."""
    from ortprep.stages.core.graph_walk import walk_graphs, walk_nodes, walk_tensors

    values = {name for node in walk_nodes(model) for name in (*node.input, *node.output)}
    values |= {value.name for graph in walk_graphs(model) for value in (*graph.input, *graph.output)}
    values |= {tensor.name for tensor in walk_tensors(model)}
    names = sorted(filter(PROVIDER_SUFFIX.search, values))
    if names:
        detail = f"{len(names)} values are named after an execution provider; a load would define them twice"
        yield LintFinding("provider-name", ERROR, names[0], detail, "#17837")


def _lint_data(model: ModelProto, data_files: Collection[str]) -> Iterator[LintFinding]:
    """Weights in another file than the one that was written: the source's own, or the writer's memory."""
    from ortprep.stages.core.graph_walk import walk_tensors

    for tensor in walk_tensors(model):
        location = location_of(tensor)
        if location is not None and location not in data_files:
            own = ", ".join(sorted(data_files)) or "the model"
            detail = f"its values are in {location!r}, not in {own}"
            yield LintFinding("external-elsewhere", ERROR, tensor.name, detail, "#17311")


def location_of(tensor: TensorProto) -> str | None:
    """Returns the file that has a tensor's values, None for the model's own."""
    if tensor.data_location != tensor.EXTERNAL:
        return None
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def _lint_interface(model: ModelProto, context: LintContext) -> Iterator[LintFinding]:
    """Inputs and outputs that the source does not have, or has in another order; a job would notice."""
    graph = model.graph
    held = {tensor.name for tensor in graph.initializer}
    held |= {sparse.values.name for sparse in graph.sparse_initializer}
    inputs = tuple(value.name for value in graph.input if value.name not in held)
    outputs = tuple(value.name for value in graph.output)
    for kind, names, expected in (("input", inputs, context.inputs), ("output", outputs, context.outputs)):
        if names != expected:
            changed = sorted({*names} ^ {*expected}) or list(names)
            detail = f"{kind}s differ from the source's: {', '.join(changed[:5])}"
            yield LintFinding("interface", ERROR, changed[0], detail)


def _name(node: NodeProto) -> str:
    return str(node.name or next(iter(node.output), ""))


def _kind(node: NodeProto) -> str:
    return f"{node.domain}.{node.op_type}"


def _count(nodes: list[NodeProto]) -> str:
    return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}, the first a {nodes[0].op_type},"
