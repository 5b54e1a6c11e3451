"""Weights that a node in half precision and one in float32 share, given to each in its own type."""

from __future__ import annotations

import onnx

from pipeline.stages.convert.half_plan import HalfPlan
from pipeline.stages.convert.plain_graph import new_name, value_names
from pipeline.stages.convert.value_types import FLOAT
from pipeline.stages.graphs.graph_walk import walk_graphs


def split_shared(model: onnx.ModelProto, plan: HalfPlan) -> dict[str, str]:
    """Gives nodes that stay float32 an initializer of their own where others take it in half precision.

    Rounded and cast back, a weight would have lost what its node is kept for.

    Args:
        model: A plain model, changed in place; tensors may refer to files.
        plan: What is to be converted; of a changed model another one has to be made.

    Returns:
        The new initializers' names, and those that they are copies of.
    """
    in_half = {
        node.input[index]
        for graph in walk_graphs(model)
        for node in graph.node
        for index in plan.half_inputs.get(node.name, ())
    }
    taken, copies = value_names(model), dict[str, str]()
    shared = {
        tensor.name: new_name(f"{tensor.name}_float32", taken)
        for graph in walk_graphs(model)
        for tensor in graph.initializer
        if tensor.name in in_half and tensor.name not in plan.interface
    }
    for graph in walk_graphs(model):
        for node in graph.node:
            halves = plan.half_inputs.get(node.name, frozenset())
            for index, name in enumerate(node.input):
                if index not in halves and name in shared and plan.source_types[name] == FLOAT:
                    node.input[index] = shared[name]
                    copies[shared[name]] = name
    for graph in walk_graphs(model):
        for tensor in list(graph.initializer):
            if shared.get(tensor.name) in copies:
                graph.initializer.add().CopyFrom(tensor)
                graph.initializer[-1].name = shared[tensor.name]
    return copies
