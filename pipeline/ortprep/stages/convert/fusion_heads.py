"""How many attention heads a transformer has, read from the shapes by which its graph cuts tokens into heads.

For child processes: what it reads are `onnx` messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import onnx
from onnx import TensorProto, numpy_helper

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


def choose_heads(graph: onnx.GraphProto, given: Heads, *, needed: bool) -> Heads:
    """Returns the given attention sizes if the graph does not contradict them, else the graph's.

    Args:
        graph: The graph; tensors of up to 16 elements must have their values.
        given: What the user says.
        needed: Whether all sizes must be known; else only what is given is checked and returned.

    Raises:
        StageError: The graph contradicts what is given, or shows no heads, or several numbers of them.
    """
    cuts, width = find_heads(graph), find_width(graph)
    fitting = [cut for cut in cuts if given.num_heads in (0, cut.num_heads)]
    fitting = [cut for cut in fitting if given.hidden_size in (0, cut.hidden_size)]
    # Most patterns take a wrong number, and the model then answers wrongly.
    is_ambiguous = needed and len(fitting) > 1 and fitting[0].hidden_size != width
    if is_ambiguous or (cuts and not fitting):
        listed = ", ".join(f"{cut.num_heads} heads of {cut.hidden_size // cut.num_heads}" for cut in cuts)
        raise StageError(
            f"cannot fuse attention: num_heads {given.num_heads}, hidden_size {given.hidden_size}\n"
            f"  expected {listed}, as in the graph's Reshape nodes",
            hint=f"fusion: {{num_heads: {cuts[0].num_heads:d}, hidden_size: {cuts[0].hidden_size:d}}}",
        )
    if not needed:
        return given if given.num_heads else Heads()
    chosen = fitting[0] if fitting else Heads(given.num_heads, given.hidden_size or width)
    if not chosen.num_heads or not chosen.hidden_size or chosen.hidden_size % chosen.num_heads:
        raise StageError(
            "cannot fuse attention: no Reshape node shows the number of heads\n"
            f"  expected num_heads and hidden_size, got {chosen.num_heads} and {chosen.hidden_size}",
            hint="fusion: {num_heads: 12, hidden_size: 768}  (of the model; or disable: [attention])",
        )
    return chosen


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
    width = find_width(graph)
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


def find_width(graph: onnx.GraphProto) -> int:
    """Returns how many features normalisations of a graph have, else its tables of embeddings, else 0."""
    dims = {weight.name: tuple(weight.dims) for weight in graph.initializer}
    # Scale and bias; of those with a skip, the second input is no initializer and the third is the scale.
    normalised = [
        name for node in graph.node if node.op_type.endswith("Normalization") for name in node.input[1:3]
    ]
    widths = Counter(dims[name][-1] for name in normalised if len(dims.get(name, ())) == 1)
    if not widths:
        tables = [dims.get(node.input[0], ()) for node in graph.node if node.op_type == "Gather"]
        widths = Counter(table[1] for table in tables if len(table) == 2)
    return max(widths, key=lambda size: (widths[size], size), default=0)


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
