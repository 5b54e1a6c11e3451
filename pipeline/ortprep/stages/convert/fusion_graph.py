"""Transformer graphs as fusion needs them: rewritten for its patterns, with their attention heads counted.

For child processes: what it reads are `onnx` messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortprep.errors import StageError

_SMALL_ELEMENTS = 16
_UNKNOWN = -2


class Heads(NamedTuple):
    """Sizes of multi-head attention.

    Attributes:
        num_heads: Attention heads; 0 if not known.
        hidden_size: Features per token, of all heads together; 0 if not known.
    """

    num_heads: int = 0
    hidden_size: int = 0


def choose_heads(graph: onnx.GraphProto, given: Heads) -> Heads:
    """Returns the likeliest attention sizes that a graph shows, of those that agree with what the user says.

    Raises:
        StageError: The graph contradicts the user, or neither says how many heads there are.
    """
    cuts = find_heads(graph)
    for cut in cuts:
        if given.num_heads in (0, cut.num_heads) and given.hidden_size in (0, cut.hidden_size):
            return cut
    if not cuts and all(given):
        return given
    # Most patterns take a wrong number, and the model then answers wrongly.
    listed = ", ".join(f"{cut.num_heads} heads of {cut.hidden_size // cut.num_heads}" for cut in cuts)
    shown = Heads(12, 768) if not cuts else cuts[0]
    raise StageError(
        f"cannot fuse attention: num_heads {given.num_heads}, hidden_size {given.hidden_size}\n"
        f"  expected {listed or 'both to be set, since the graph shows no heads in its Reshape nodes'}",
        hint=f"fusion: {{num_heads: {shown.num_heads:d}, hidden_size: {shown.hidden_size:d}}}",
    )


def find_heads(graph: onnx.GraphProto) -> tuple[Heads, ...]:
    """Returns every way in which a graph cuts tokens into heads, the likeliest first; () if there is none.

    A cut is a `Reshape` to [batch, sequence, heads, size], or to [batch, sequence, 3, heads, size] if
    queries, keys and values are one tensor, whose heads a `Transpose` then moves before the tokens. Its sizes
    may be one constant, or the last two parts of a `Concat`, and -1 for the number of heads means as many as
    make up the width of the normalisations. Cuts into heads that make up the width of the normalisations come
    first: those of keys and values may have fewer heads than those of queries.

    Args:
        graph: The graph; tensors of up to 16 elements must have their values.
    """
    constants = _constants(graph)
    producers = {name: node for node in graph.node for name in node.output}
    dims = {weight.name: tuple(weight.dims) for weight in graph.initializer}
    # Scale and bias; of those with a skip, the second input is no initializer and the third is the scale.
    normalised = [
        name for node in graph.node if node.op_type.endswith("Normalization") for name in node.input[1:3]
    ]
    widths = Counter(dims[name][-1] for name in normalised if len(dims.get(name, ())) == 1)
    width = max(widths, key=lambda size: (widths[size], size), default=0)
    cuts: Counter[Heads] = Counter()
    for node in graph.node:
        reshape = producers.get(node.input[0]) if node.op_type == "Transpose" else None
        if reshape is None or reshape.op_type != "Reshape":
            continue
        sizes = _sizes(reshape.input[1], constants, producers)
        order = next((list(item.ints) for item in node.attribute if item.name == "perm"), [])
        if len(sizes) in (4, 5) and len(order) == len(sizes) and order[-2] != len(sizes) - 2:
            heads = width // sizes[-1] if sizes[-2] == -1 else sizes[-2]
            cuts[Heads(heads, heads * sizes[-1])] += 1
    cuts.pop(Heads(), None)
    return tuple(sorted(cuts, key=lambda cut: (cut.hidden_size != width, -cuts[cut], -cut.num_heads)))


def _sizes(
    name: str, constants: Mapping[str, tuple[int, ...]], producers: Mapping[str, onnx.NodeProto]
) -> tuple[int, ...]:
    """Returns what a `Reshape` reshapes to, if the last two sizes are known, else ()."""
    concat = producers.get(name)
    sizes = constants.get(name, ())
    if not sizes and concat is not None and concat.op_type == "Concat":
        sizes = tuple(size for part in concat.input for size in constants.get(part, (_UNKNOWN,)))
    is_known = len(sizes) > 2 and sizes[-1] > 0 and sizes[-2] not in (0, _UNKNOWN)
    return sizes if is_known else ()


def _constants(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Returns the values of small vectors of int64: initializers, and what `Constant` nodes give."""
    tensors = {weight.name: weight for weight in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            tensors[node.output[0]] = attribute.t
    return {
        name: tuple(int(size) for size in numpy_helper.to_array(tensor).reshape(-1))
        for name, tensor in tensors.items()
        if tensor.data_type == TensorProto.INT64 and math.prod(tensor.dims) <= _SMALL_ELEMENTS
    }


def rewrite_as_patterns_expect(graph: onnx.GraphProto) -> None:
    """Rewrites what PyTorch's exporter writes today as the patterns of the older one, of TorchScript.

    Each rewrite is for one difference that hides the attention of a plain BERT from them (seen with PyTorch
    2.13 and ONNX Runtime 1.31.1), and leaves what a graph computes as it is.
    """
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
