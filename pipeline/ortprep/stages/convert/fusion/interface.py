"""What a pass must leave as it was: the names, types, shapes and order of a model's inputs and outputs.

For child processes: what it compares are `onnx` messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx

from ortprep.errors import StageError
from ortprep.stages.core.graphs.graph_walk import subgraphs


@dataclass(frozen=True)
class Interface:
    """What a graph takes and gives.

    Attributes:
        inputs: Serialised descriptions by name, in order, without those that initializers fill.
        outputs: The same of what it gives.
        used: Names of values that nodes read, at any depth.
    """

    inputs: Mapping[str, bytes]
    outputs: Mapping[str, bytes]
    used: frozenset[str]

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> Interface:
        """Reads it from a graph."""
        return cls(_inputs(graph), _describe(graph.output), frozenset(_read_by(graph.node)))

    def restore(self, graph: onnx.GraphProto, *, hint: str) -> None:
        """Checks a rewritten graph, and puts back unused inputs that the pass dropped.

        Raises:
            StageError: Something was dropped, added, changed or moved.
        """
        unused = self.inputs.keys() - self.used - self.outputs.keys()
        expected = {name: description for name, description in self.inputs.items() if name not in unused}
        got = {name: description for name, description in _inputs(graph).items() if name not in unused}
        _check_same("inputs", expected, got, hint)
        _check_same("outputs", self.outputs, _describe(graph.output), hint)
        if unused - {value.name for value in graph.input}:
            filled = [value for value in graph.input if value.name not in self.inputs]
            del graph.input[:]
            for description in self.inputs.values():
                graph.input.add().ParseFromString(description)
            graph.input.extend(filled)


def _inputs(graph: onnx.GraphProto) -> dict[str, bytes]:
    filled = {weight.name for weight in graph.initializer}
    return {name: description for name, description in _describe(graph.input).items() if name not in filled}


def _describe(values: Iterable[onnx.ValueInfoProto]) -> dict[str, bytes]:
    return {value.name: value.SerializeToString(deterministic=True) for value in values}


def _read_by(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    read: set[str] = set()
    for node in nodes:
        read.update(node.input)
        for graph in subgraphs(node):
            read |= _read_by(graph.node) | {value.name for value in graph.output}
    return read


def _check_same(what: str, expected: Mapping[str, bytes], got: Mapping[str, bytes], hint: str) -> None:
    if list(expected.items()) == list(got.items()):
        return
    changed = [name for name in expected if got.get(name) != expected[name]] or list(got)
    raise StageError(
        f"pass changed {what} of the model: {', '.join(changed)}\n"
        f"  expected {', '.join(expected)} as they were, got {', '.join(got)}",
        hint=hint,
    )
