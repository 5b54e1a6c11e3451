"""Takes out of a written graph what ONNX Runtime put or left there and its next session stumbles over.

Only the graph is touched, never a weight. For child processes: it imports onnx.

Copies between devices: a session on CUDA adds `MemcpyFromHost` and `MemcpyToHost` nodes where a value crosses
devices, and gives the value on the device the name `VALUE_CUDAExecutionProvider`; weights that both devices
read are doubled under such a name. All that is saved (microsoft/onnxruntime #11348, #17837), and the next
session adds it once more: the load fails with a name defined twice (microsoft/foundry-local #1075). The graph
gets back what stood there before, so that each load places nodes again.

Phantom inputs: up to IR version 3 every initializer is listed among the inputs. One that the optimiser has
merged or folded away stays listed, and the written model demands it in every run (seen on 1.31.1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import onnx

from ortprep.stages.core.graph_walk import walk_graphs, walk_nodes
from ortprep.stages.optimize.lint import COPY_OPERATORS, PROVIDER_SUFFIX


def remove_copies(model: onnx.ModelProto) -> int:
    """Takes copies between devices out of a model, in place.

    Returns:
        How many nodes and doubled weights were removed, subgraphs included.
    """
    graphs = list(walk_graphs(model))
    fixed = {value.name for graph in graphs for value in (*graph.input, *graph.output)}
    pairs = [pair for graph in graphs for pair in (*_copied_values(graph), *_doubled_weights(graph))]
    # A name on a device is made of the value's own, so it means the same in every graph.
    aliases = {alias: name for alias, name in pairs if PROVIDER_SUFFIX.search(alias) and alias not in fixed}
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
        original = PROVIDER_SUFFIX.sub("", name)
        if original != name and kinds.get(original) == kind:
            yield name, original


def _is_copy(node: onnx.NodeProto, aliases: Mapping[str, str]) -> bool:
    return node.op_type in COPY_OPERATORS and not aliases.keys().isdisjoint((*node.input, *node.output))


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
