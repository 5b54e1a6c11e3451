"""Names that a pass gives to nodes."""

from __future__ import annotations

import time

import onnx
import pytest
from onnx import helper

from ortprep.stages.core.graphs.graph_walk import name_nodes


@pytest.mark.attack
def test_a_model_of_many_nodes_without_names_is_named_in_one_go():
    """Looking for the next free number from 0 for each node took minutes."""
    model = onnx.ModelProto()
    nodes = [helper.make_node("Relu", ["x"], ["y"]) for _ in range(20_000)]
    nodes[7].name = "Relu_3"
    model.graph.node.extend(nodes)
    started = time.perf_counter()
    name_nodes(model)
    assert time.perf_counter() - started < 5
    names = [node.name for node in model.graph.node]
    assert names[:5] == ["Relu_0", "Relu_1", "Relu_2", "Relu_4", "Relu_5"]
    assert len(set(names)) == len(names)
