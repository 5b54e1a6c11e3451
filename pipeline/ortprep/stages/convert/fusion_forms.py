"""What PyTorch's exporter writes today, rewritten as the patterns of transformer fusion know it.

The patterns follow what the older exporter, of TorchScript, wrote. Each rewrite here is for one difference
that hides the attention of a plain BERT from them (seen with PyTorch 2.13 and ONNX Runtime 1.31.1), and
leaves what a graph computes as it is. For child processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def write_as_patterns_expect(graph: onnx.GraphProto) -> None:
    """Applies every rewrite."""
    constants = {weight.name: weight for weight in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    added: dict[str, TensorProto] = {}
    for node in graph.node:
        _divide_scores(node, producers, constants, added)
    nodes = [part for node in graph.node for part in _split_unsqueeze(node, constants, added)]
    graph.initializer.extend(added.values())
    del graph.node[:]
    graph.node.extend(nodes)


def _divide_scores(
    softmax: onnx.NodeProto,
    producers: Mapping[str, onnx.NodeProto],
    constants: Mapping[str, TensorProto],
    added: dict[str, TensorProto],
) -> None:
    """Divides attention scores instead of multiplying them, if their mask is a product too.

    The pattern takes the first of the two summed products for the mask.
    """
    total = producers.get(softmax.input[0]) if softmax.op_type == "Softmax" else None
    parts = [producers.get(name) for name in total.input] if total is not None else []
    if len(parts) != 2 or any(part is None or part.op_type != "Mul" for part in parts):
        return
    scores = parts[0]
    assert scores is not None
    product, factor = producers.get(scores.input[0]), constants.get(scores.input[1])
    if product is None or product.op_type != "MatMul" or factor is None or factor.dims:
        return
    divisor = f"{scores.name}/divisor"
    added[divisor] = numpy_helper.from_array(np.reciprocal(numpy_helper.to_array(factor)), divisor)
    scores.op_type, scores.input[1] = "Div", divisor


def _split_unsqueeze(
    node: onnx.NodeProto, constants: Mapping[str, TensorProto], added: dict[str, TensorProto]
) -> Iterator[onnx.NodeProto]:
    """Splits an `Unsqueeze` of several axes into one node per axis: `mask[:, None, None, :]`."""
    # Before opset 13 the axes are an attribute, and exporters make one node for each.
    axes = constants.get(node.input[1]) if node.op_type == "Unsqueeze" and len(node.input) == 2 else None
    # Each axis counts those before it, so that in this order every node puts its axis where it ends up.
    order = [] if axes is None else sorted(int(axis) for axis in numpy_helper.to_array(axes).reshape(-1))
    if len(order) < 2 or order[0] < 0:
        yield node
        return
    value = node.input[0]
    for axis in order:
        constant = f"{node.name}/axes_{axis}"
        added[constant] = numpy_helper.from_array(np.array([axis], np.int64), constant)
        output = node.output[0] if axis == order[-1] else f"{node.output[0]}/unsqueezed_{axis}"
        yield helper.make_node("Unsqueeze", [value, constant], [output], name=f"{node.name}/{axis}")
        value = output
