"""Facts about a model's inputs, read from its graph without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ortprep.bundle.model_facts import ModelFacts
from ortprep.bundle.onnx_wire import read_skeleton
from ortprep.stages.fetch.inspection import inspect_model, parse_skeleton
from ortprep.stages.fetch.stage import refuse_what_is_no_model

if TYPE_CHECKING:
    import onnx

_MIN_PIXEL_MEAN = 30.0


@dataclass(frozen=True)
class GraphFacts:
    """Facts that were read from a model.

    Attributes:
        model: Its interface, operators and sizes.
        highest: Largest value that the graph itself expects of an input, by name: 255 where it scales pixels,
            N-1 where it encodes one of N classes.
        nodes: Names of the main graph's nodes, in order.
    """

    model: ModelFacts
    highest: Mapping[str, float]
    nodes: tuple[str, ...]

    def bound(self, name: str) -> int | None:
        """Returns the exclusive upper bound of an input of ids or classes, None if the graph sets none."""
        rows = self.model.interface.index_bounds.get(name)
        return int(self.highest[name]) + 1 if rows is None and name in self.highest else rows


def read_facts(model: Path) -> GraphFacts:
    """Reads a model file, but not its weights and external data; for child processes.

    Raises:
        SourceError: It is not an ONNX model, or refers to data outside its folder.
    """
    refuse_what_is_no_model(model, str(model))
    facts = inspect_model((str(model), str(model)))
    graph = parse_skeleton(read_skeleton(model)).graph
    return GraphFacts(facts, find_highest(graph), tuple(node.name for node in graph.node))


def find_highest(graph: onnx.GraphProto) -> Mapping[str, float]:
    """Returns the largest value that a graph expects of some inputs, by name; for child processes.

    A graph says so where it scales pixels or encodes classes itself: by the constant that the first operator
    takes which does more than move or cast an input's values.
    """
    from ortprep.stages.core.graph_walk import PASSED_ON

    constants = {tensor.name: tensor for tensor in graph.initializer}
    origins = {item.name: item.name for item in graph.input if item.name not in constants}
    highest: dict[str, float] = {}
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update((node.output[0], one.t) for one in node.attribute if one.name == "value")
            continue
        first, second = (*node.input, "", "")[:2]
        if first not in origins:
            continue
        if node.op_type in PASSED_ON and node.output:
            origins[node.output[0]] = origins[first]
        elif second in constants:
            found = _expected(node.op_type, constants[second])
            if found is not None:
                highest.setdefault(origins[first], found)
    return highest


def _expected(operator: str, constant: onnx.TensorProto) -> float | None:
    """Returns the largest value that an operator with that constant expects, None if it does not tell."""
    from onnx import TensorProto, numpy_helper

    if constant.data_location == TensorProto.EXTERNAL:
        return None
    try:
        values = np.asarray(numpy_helper.to_array(constant)).reshape(-1)
    except (ValueError, TypeError):  # left out of the skeleton, or of a type that numpy lacks
        return None
    if values.size == 0 or values.dtype.kind not in "fiu":
        return None
    extent = float(np.abs(values.astype(np.float64)).max())
    scale = extent if operator == "Div" else 1 / extent if operator == "Mul" and extent > 0 else 0
    if 250 <= scale <= 256 or (operator == "Sub" and _MIN_PIXEL_MEAN <= extent <= 255):
        return 255.0
    if operator == "OneHot" and values.size == 1:
        return extent - 1
    if operator == "Equal" and values.size > 1 and np.array_equal(values, np.arange(values.size)):
        return extent
    return None
