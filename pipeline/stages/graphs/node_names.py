"""Names for nodes: what a search, a block list and a user call a node by."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from pipeline.stages.graphs.graph_walk import walk_graphs


def name_nodes(model: onnx.ModelProto) -> None:
    """Gives every node of the graph and its subgraphs a name that no other has.

    A name that is the first of its kind is kept; a node without one is called after its operator. The same
    model is always given the same names, so that one pass can be told of nodes another has listed.
    """
    nodes = [node for graph in walk_graphs(model) for node in graph.node]
    taken = {node.name for node in nodes}
    seen: set[str] = set()
    for node in nodes:
        if not node.name or node.name in seen:
            free = (name for name in _candidates(node.name or node.op_type) if name not in taken)
            node.name = next(free)
            taken.add(node.name)
        seen.add(node.name)


def _candidates(stem: str) -> Iterator[str]:
    count = 0
    while True:
        yield f"{stem}_{count}"
        count += 1
