"""Hazards of graphs that ONNX Runtime writes: rules over a description of the graph, without disk or process.

A rule yields findings; `error` means that the graph is not used and the ladder steps down, `requirement` that
it binds the variant to a kind of machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ortprep.bundle.manifest import LintFinding
from ortprep.bundle.paths import is_safe_path
from ortprep.stages.core.contract import PORTABLE
from ortprep.stages.optimize.graph_description import ExternalReference, GraphDescription, NodeDescription

ERROR, REQUIREMENT = "error", "requirement"

NCHWC_DOMAIN = "com.microsoft.nchwc"
INTERNAL_NHWC_DOMAIN = "com.ms.internal.nhwc"
ONNX_DOMAINS = frozenset({"", "ai.onnx.ml"})
COPY_OPERATORS = frozenset({"MemcpyFromHost", "MemcpyToHost"})
PROVIDER_SUFFIX = re.compile(r"_[A-Za-z]+ExecutionProvider$")

_MEMORY_TAG = re.compile(r"^\*/|_ORT_MEM_ADDR_")


@dataclass(frozen=True)
class LintContext:
    """What a graph is judged against.

    Attributes:
        variant: `cpu`, `cuda` or `portable`.
        data_files: Names of the external data files it may refer to.
        file_sizes: Size in bytes of every file beside the model, by relative path.
        opsets: Newest opset by domain that the installed ONNX Runtime reads; a domain it does not have is not
            there.
        source_operators: Operators that the source model uses itself, as `SourceRecord.operators` has them.
        inputs: Names of the source's inputs, in order.
        outputs: Names of its outputs, in order.
    """

    variant: str
    data_files: frozenset[str]
    file_sizes: Mapping[str, int]
    opsets: Mapping[str, int]
    source_operators: frozenset[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Rule = Callable[[GraphDescription, LintContext], Iterator[LintFinding]]


def lint_graph(graph: GraphDescription, context: LintContext) -> tuple[LintFinding, ...]:
    """Returns what every rule finds, in the order of the rules."""
    return tuple(finding for rule in RULES for finding in rule(graph, context))


def errors_of(findings: Iterable[LintFinding]) -> tuple[LintFinding, ...]:
    """Returns the findings that forbid the graph."""
    return tuple(finding for finding in findings if finding.severity == ERROR)


def _find_copies(graph: GraphDescription, _: LintContext) -> Iterator[LintFinding]:
    """Copies between devices, written into the file: no CPU session has a kernel for them."""
    nodes = [node for node in graph.nodes if node.operator in COPY_OPERATORS]
    if nodes:
        detail = f"{_count(nodes)} copies between devices; ONNX Runtime adds its own at every load"
        yield LintFinding("memcpy-node", ERROR, nodes[0].name, detail, "#11348")


def _find_provider_names(graph: GraphDescription, _: LintContext) -> Iterator[LintFinding]:
    """Names that ONNX Runtime will want to give again when it places the nodes again."""
    names = sorted(name for name in graph.values if PROVIDER_SUFFIX.search(name))
    if names:
        detail = f"{len(names)} values are named after an execution provider; a load would define them twice"
        yield LintFinding("provider-name", ERROR, names[0], detail, "#17837")


def _find_compiled_nodes(graph: GraphDescription, _: LintContext) -> Iterator[LintFinding]:
    """Nodes that an execution provider has compiled for itself."""
    nodes = [node for node in graph.nodes if node.operator == "EPContext"]
    if nodes:
        yield LintFinding(
            "compiled-node", ERROR, nodes[0].name, f"{_count(nodes)} compiled by an execution provider"
        )


def _find_nchwc(graph: GraphDescription, around: LintContext) -> Iterator[LintFinding]:
    """Blocked layouts: on a machine with another block size they fail, or answer wrongly without a word."""
    nodes = [node for node in graph.nodes if node.domain == NCHWC_DOMAIN]
    if nodes:
        severity = ERROR if around.variant == PORTABLE else REQUIREMENT
        detail = f"{_count(nodes)} with channels in blocks that fit this processor's instruction set"
        yield LintFinding("nchwc-layout", severity, NCHWC_DOMAIN, detail, "#26174")


def _find_internal_nhwc(graph: GraphDescription, around: LintContext) -> Iterator[LintFinding]:
    """The layout that some providers ask for while they take nodes; CPU has no kernels in this domain."""
    nodes = [node for node in graph.nodes if node.domain == INTERNAL_NHWC_DOMAIN]
    if nodes:
        severity = REQUIREMENT if around.variant == "cuda" else ERROR
        detail = f"{_count(nodes)} channels last"
        yield LintFinding("internal-nhwc", severity, INTERNAL_NHWC_DOMAIN, detail, "#20379")


def _find_memory_tags(graph: GraphDescription, _: LintContext) -> Iterator[LintFinding]:
    """Addresses of the process that wrote the file, in the place of weights."""
    for reference in graph.external:
        if _MEMORY_TAG.search(reference.location):
            detail = f"its values are at a memory address of a process that has ended ({reference.location})"
            yield LintFinding("memory-address", ERROR, reference.tensor, detail, "#25510")


def _find_outside_data(graph: GraphDescription, _: LintContext) -> Iterator[LintFinding]:
    """References that leave the folder of the model."""
    for reference in _file_references(graph):
        if not is_safe_path(reference.location):
            detail = f"its values are in {reference.location!r}"
            yield LintFinding("external-outside", ERROR, reference.tensor, detail, "#26776")


def _find_foreign_data(graph: GraphDescription, around: LintContext) -> Iterator[LintFinding]:
    """References to another file than the one that was written, such as the source's own data."""
    for reference in _file_references(graph):
        if is_safe_path(reference.location) and reference.location not in around.data_files:
            own = ", ".join(sorted(around.data_files)) or "the model"
            detail = f"its values are in {reference.location!r}, not in {own}"
            yield LintFinding("external-elsewhere", ERROR, reference.tensor, detail, "#17311")


def _find_overruns(graph: GraphDescription, around: LintContext) -> Iterator[LintFinding]:
    """References past the end of the file, or to a file that is not there."""
    for reference in _file_references(graph):
        size = around.file_sizes.get(reference.location, -1)
        end = reference.offset + reference.length
        if end > size:
            there = f"has {size} bytes" if size >= 0 else "is not there"
            detail = f"its values end at byte {end} of {reference.location!r}, which {there}"
            yield LintFinding("external-overrun", ERROR, reference.tensor, detail, "#27547")


def _find_unknown_operators(graph: GraphDescription, around: LintContext) -> Iterator[LintFinding]:
    """Domains and ONNX opsets that the installed ONNX Runtime does not read."""
    for domain in sorted(graph.domains):
        newest = around.opsets.get(domain)
        if newest is None:
            detail = "the installed ONNX Runtime has no operators in this domain"
            yield LintFinding("unknown-domain", ERROR, domain, detail, "#20247")
        elif domain in ONNX_DOMAINS and graph.opsets.get(domain, 0) > newest:
            detail = f"opset {graph.opsets[domain]}; the installed ONNX Runtime reads up to {newest}"
            yield LintFinding("unknown-opset", ERROR, domain or "ai.onnx", detail, "#2371")


def _find_unportable(graph: GraphDescription, around: LintContext) -> Iterator[LintFinding]:
    """Operators beyond ONNX's own that the source did not have: the portable variant is for any machine."""
    if around.variant != PORTABLE:
        return
    beyond = [node for node in graph.operators if node.domain not in ONNX_DOMAINS]
    for kind in sorted({node.kind for node in beyond} - around.source_operators):
        nodes = [node for node in beyond if node.kind == kind]
        yield LintFinding("not-portable", ERROR, kind, f"{_count(nodes)} that the source does not have")


def _find_changed_interface(graph: GraphDescription, around: LintContext) -> Iterator[LintFinding]:
    """Inputs and outputs that the source does not have, or has in another order; a job would notice."""
    for kind, names, expected in (
        ("input", graph.inputs, around.inputs),
        ("output", graph.outputs, around.outputs),
    ):
        if names != expected:
            changed = sorted({*names} ^ {*expected}) or list(names)
            detail = f"{kind}s differ from the source's: {', '.join(changed[:5])}"
            yield LintFinding("interface", ERROR, changed[0], detail)


RULES: tuple[Rule, ...] = (
    _find_copies,
    _find_provider_names,
    _find_compiled_nodes,
    _find_nchwc,
    _find_internal_nhwc,
    _find_memory_tags,
    _find_outside_data,
    _find_foreign_data,
    _find_overruns,
    _find_unknown_operators,
    _find_unportable,
    _find_changed_interface,
)
"""Every rule, in the order of their findings."""


def _file_references(graph: GraphDescription) -> Iterator[ExternalReference]:
    return (reference for reference in graph.external if not _MEMORY_TAG.search(reference.location))


def _count(nodes: list[NodeDescription]) -> str:
    return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}, the first a {nodes[0].operator},"
