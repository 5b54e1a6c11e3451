"""The child process that writes an optimised graph, takes hazards out of it, and says what is in it.

Copies between devices: a session on CUDA adds `MemcpyFromHost` and `MemcpyToHost` nodes where a value crosses
devices, and gives the value on the device the name `VALUE_CUDAExecutionProvider`; weights that both devices
read are doubled under such a name. All that is saved (microsoft/onnxruntime #11348, #17837), and the next
session adds it once more: the load fails with a name defined twice (microsoft/foundry-local #1075). The graph
gets back what stood there before, so that each load places nodes again.

Phantom inputs: up to IR version 3 every initializer is listed among the inputs. One that the optimiser has
merged or folded away stays listed, and the written model demands it in every run (seen on 1.31.1).

What is left to look for are hazards that a load and a run in a fresh process do not show.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.model_facts import ModelFacts
from ortprep.bundle.onnx_wire import read_skeleton
from ortprep.bundle.session_record import SessionPlan
from ortprep.runtime.loading.session import build_session
from ortprep.stages.core.contract import PORTABLE
from ortprep.stages.fetch.inspection import describe_model

if TYPE_CHECKING:
    import onnx

NCHWC_DOMAIN = "com.microsoft.nchwc"
ONNX_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml"})

_COPY_OPERATORS = frozenset({"MemcpyFromHost", "MemcpyToHost"})
_PROVIDER_SUFFIX = re.compile(r"_[A-Za-z]+ExecutionProvider$")


@dataclass(frozen=True)
class SaveRequest:
    """A file to write, or, without a plan, to look at.

    Attributes:
        model: Absolute path of the model file, in a folder of its own; its data comes to lie beside it.
        plan: The session that writes it; None if the files are already there.
        variant: `cpu`, `cuda` or `portable`.
        inputs: Names of the source's inputs.
        operators: Operators that the source uses itself, as `SourceRecord.operators` has them.
    """

    model: Path
    plan: SessionPlan | None
    variant: str
    inputs: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class SaveResult:
    """Content of the written file.

    Attributes:
        facts: Description of its graph.
        hazards: What forbids the file, a line each.
        onnxruntime: Version that wrote it.
    """

    facts: ModelFacts
    hazards: tuple[str, ...]
    onnxruntime: str


def save_optimized(request: SaveRequest) -> SaveResult:
    """Child function: writes the file if there is a plan, and describes it.

    Raises:
        LoadError: ONNX Runtime refuses the model, or cannot write.
    """
    import onnx
    import onnxruntime

    from ortprep.stages.core.graph_walk import walk_tensors

    if request.plan is None:
        model = onnx.ModelProto.FromString(read_skeleton(request.model))
    else:
        # The session is dropped at once, so its memory is free before the file is read.
        build_session(request.plan)
        model = onnx.load(request.model, load_external_data=False)
        _repair(model, request)
        if all(tensor.data_location != tensor.EXTERNAL for tensor in walk_tensors(model)):
            # ONNX Runtime makes the file whether or not a weight is large enough for it.
            request.model.with_name(f"{request.model.name}.data").unlink(missing_ok=True)
    hazards = find_unportable(model, request.operators) if request.variant == PORTABLE else ()
    return SaveResult(describe_model(model), tuple(hazards), onnxruntime.__version__)


def find_unportable(model: onnx.ModelProto, operators: Collection[str]) -> Iterator[str]:
    """Yields operators beyond ONNX's own that are not among the source's, which are given."""
    from ortprep.stages.core.graph_walk import walk_operators

    counts = Counter(
        f"{node.domain}.{node.op_type}" for node in walk_operators(model) if node.domain not in ONNX_DOMAINS
    )
    for kind in sorted(counts.keys() - set(operators)):
        yield f"not portable: {kind} in {counts[kind]} nodes, and not in the source"


def _repair(model: onnx.ModelProto, request: SaveRequest) -> None:
    """Takes hazards out of a written graph and writes it again; cheap, since its weights are elsewhere."""
    copies = remove_copies(model) if request.variant == "cuda" else 0
    if remove_phantom_inputs(model, request.inputs) or copies:
        repaired = request.model.with_name(f"{request.model.name}.repaired")
        repaired.write_bytes(model.SerializeToString())
        repaired.replace(request.model)


def remove_copies(model: onnx.ModelProto) -> int:
    """Takes copies between devices out of a model, in place.

    Returns:
        How many nodes and doubled weights were removed, subgraphs included.
    """
    from ortprep.stages.core.graph_walk import walk_graphs

    graphs = list(walk_graphs(model))
    fixed = {value.name for graph in graphs for value in (*graph.input, *graph.output)}
    pairs = [pair for graph in graphs for pair in (*_copied_values(graph), *_doubled_weights(graph))]
    # A name on a device is made of the value's own, so it means the same in every graph.
    aliases = {alias: name for alias, name in pairs if _PROVIDER_SUFFIX.search(alias) and alias not in fixed}
    removed = 0
    for graph in reversed(graphs):  # inner ones first: a list that loses a node is made of copies
        removed += _keep(graph.node, [node for node in graph.node if not _is_copy(node, aliases)])
        removed += _keep(graph.initializer, [one for one in graph.initializer if one.name not in aliases])
        _keep(graph.value_info, [value for value in graph.value_info if value.name not in aliases])
        for node in graph.node:
            node.input[:] = [_resolve(name, aliases) for name in node.input]
            node.output[:] = [_resolve(name, aliases) for name in node.output]
    return removed


def remove_phantom_inputs(model: onnx.ModelProto, inputs: Collection[str]) -> int:
    """Takes inputs out of a model, in place, that are neither initializers nor read by anyone.

    Returns:
        How many were removed.
    """
    from ortprep.stages.core.graph_walk import walk_nodes

    graph = model.graph
    used_names = {*inputs, *(tensor.name for tensor in graph.initializer)}
    used_names |= {tensor.values.name for tensor in graph.sparse_initializer}
    used_names |= {name for node in walk_nodes(model) for name in node.input}
    used_names |= {value.name for value in graph.output}
    return _keep(graph.input, [value for value in graph.input if value.name in used_names])


def _copied_values(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Yields the name on the device and the name it was made from, for each copy."""
    for node in graph.node:
        if node.op_type == "MemcpyFromHost":
            yield node.output[0], node.input[0]
        elif node.op_type == "MemcpyToHost":
            yield node.input[0], node.output[0]


def _doubled_weights(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    kinds = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
    for name, kind in kinds.items():
        original = _PROVIDER_SUFFIX.sub("", name)
        if original != name and kinds.get(original) == kind:
            yield name, original


def _is_copy(node: onnx.NodeProto, aliases: Mapping[str, str]) -> bool:
    return node.op_type in _COPY_OPERATORS and not aliases.keys().isdisjoint((*node.input, *node.output))


def _keep(field: Any, items: list[Any]) -> int:
    """Replaces a repeated field's items; returns how many went."""
    removed = len(field) - len(items)
    if removed:
        del field[:]
        field.extend(items)
    return removed


def _resolve(name: str, aliases: Mapping[str, str]) -> str:
    seen = {name}
    while (name := aliases.get(name, name)) not in seen:
        seen.add(name)
    return name
