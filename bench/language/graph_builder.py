"""Writing a graph node by node, under names of the exporters' kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bench.demo_models import draw_weight

OPSET, IR_VERSION = 17, 8

INITIAL_SPREAD = 0.02
"""Standard deviation of a transformer's first weights (Devlin et al., 2018; Radford et al., 2019)."""


class GraphBuilder:
    """Collects nodes, small constants and weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self.weights: list[TensorProto] = []

    def node(self, operator: str, inputs: Sequence[str], name: str, **attributes: object) -> str:
        """Adds a node with one output and returns the output's name, which is the node's."""
        self.node_of(operator, inputs, [name], name, **attributes)
        return name

    def node_of(
        self, operator: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **attributes: object
    ) -> None:
        """Adds a node with several outputs."""
        self.nodes.append(helper.make_node(operator, list(inputs), list(outputs), name=name, **attributes))

    def constant(self, name: str, value: NDArray[np.generic] | np.generic) -> str:
        """Adds a small initializer and returns its name."""
        self.constants[name] = numpy_helper.from_array(np.asarray(value), name)
        return name

    def weight(
        self,
        name: str,
        dims: tuple[int, ...],
        *,
        mean: float = 0.0,
        spread: float = INITIAL_SPREAD,
        uniform: bool = False,
    ) -> str:
        """Adds a weight and returns its name."""
        values = draw_weight(name, dims, mean=mean, spread=spread, uniform=uniform)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def linear(
        self,
        value: str,
        scope: str,
        sizes: tuple[int, int],
        *,
        spread: float = INITIAL_SPREAD,
        output: str | None = None,
    ) -> str:
        """Adds a product with a weight [in, out] and a bias."""
        weight = self.weight(f"{scope}.weight", sizes, spread=spread)
        product = self.node("MatMul", [value, weight], f"{scope}/MatMul")
        bias = self.weight(f"{scope}.bias", sizes[1:], spread=spread)
        return self.node("Add", [product, bias], output or f"{scope}/Add")

    def build(
        self, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        """Returns the model."""
        tensors = [*self.constants.values(), *self.weights]
        graph = helper.make_graph(self.nodes, name, list(inputs), list(outputs), initializer=tensors)
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, producer_name="ortprep", ir_version=IR_VERSION)


def tokens(*names: str) -> list[onnx.ValueInfoProto]:
    """Returns inputs that say something of every token: int64 [batch, sequence]."""
    return [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in names]


def floats(name: str, dims: Sequence[int | str]) -> onnx.ValueInfoProto:
    """Returns an output of that shape."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(dims))
