"""A graph in the form that passes work on: no functions, constants as initializers, every name once.

ONNX Runtime does the same when it loads a model, so that no answer changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortprep.errors import StageError
from ortprep.stages.core.graphs.graph_walk import defined_names, new_name, subgraphs, walk_graphs

_LISTED_INITIALIZERS_BEFORE_IR = 4


def make_plain(model: onnx.ModelProto) -> None:
    """Brings a model, its nodes named, into that form; external weights stay where they are.

    Raises:
        StageError: It has functions of its own.
    """
    if model.functions:
        names = ", ".join(function.name for function in model.functions[:3])
        raise StageError(
            f"model defines its own functions: {names}\n  expected only operators of ONNX Runtime",
            hint='python -c "import onnx, onnx.inliner as i; '
            "onnx.save(i.inline_local_functions(onnx.load('model.onnx')), 'inlined.onnx')\"",
        )
    # Inner graphs first: those that follow are rebuilt, and what they hold is copied.
    for graph in reversed(list(walk_graphs(model))):
        _lift_constants(graph)
    model.ir_version = max(model.ir_version, _LISTED_INITIALIZERS_BEFORE_IR)
    _drop_inputs_with_values(model.graph)
    _rename_below(model.graph, {}, set())


def replace_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """Replaces a graph's nodes by copies; references to its old nodes and subgraphs are stale."""
    copies = onnx.GraphProto(node=nodes)
    del graph.node[:]
    graph.node.extend(copies.node)


def _lift_constants(graph: onnx.GraphProto) -> None:
    """Turns Constant nodes of float32 into initializers."""
    nodes = []
    for node in graph.node:
        tensor = _constant(node)
        if tensor is None:
            nodes.append(node)
        else:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
    if len(nodes) < len(graph.node):
        replace_nodes(graph, nodes)


def _constant(node: onnx.NodeProto) -> TensorProto | None:
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT:
            return attribute.t
        if attribute.name in ("value_float", "value_floats"):
            value = onnx.helper.get_attribute_value(attribute)
            return numpy_helper.from_array(np.asarray(value, np.float32))
    return None


def _drop_inputs_with_values(graph: onnx.GraphProto) -> None:
    """Drops inputs that initializers fill, so that the interface lists real inputs only."""
    valued = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in valued]
    del graph.input[:]
    graph.input.extend(inputs)


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
