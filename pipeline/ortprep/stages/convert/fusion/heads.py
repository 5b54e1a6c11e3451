"""How many attention heads a transformer has, read from the shapes by which its graph cuts tokens into heads.

For child processes: what it reads are `onnx` messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto, numpy_helper

from ortprep.errors import StageError

_NORMALISATIONS = frozenset(
    {
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    }
)
_SMALL_ELEMENTS = 16
_UNKNOWN = -2


@dataclass(frozen=True)
class Heads:
    """Sizes of multi-head attention.

    Attributes:
        num_heads: Attention heads; 0 if not known.
        hidden_size: Features per token, of all heads together; 0 if not known.
    """

    num_heads: int = 0
    hidden_size: int = 0


def choose_heads(graph: onnx.GraphProto, user_heads: Heads, *, needed: bool) -> Heads:
    """Returns the given attention sizes if the graph does not contradict them, else the graph's.

    Args:
        graph: The graph; tensors of up to 16 elements must have their values.
        user_heads: What the user says.
        needed: Whether all sizes must be known; else only what is given is checked and returned.

    Raises:
        StageError: The graph contradicts what is given, or shows no heads, or several numbers of them.
    """
    cuts = find_heads(graph)
    fitting = [cut for cut in cuts if user_heads.num_heads in (0, cut.num_heads)]
    fitting = [cut for cut in fitting if user_heads.hidden_size in (0, cut.hidden_size)]
    if cuts and not fitting:
        # Told a wrong number, most patterns take it, and the model answers wrongly.
        raise _unfit(f"num_heads {user_heads.num_heads}, hidden_size {user_heads.hidden_size}", cuts)
    if not needed:
        return user_heads if user_heads.num_heads else Heads()
    if not fitting:
        return _without_cuts(user_heads, find_width(graph))
    if len(fitting) > 1 and fitting[0].hidden_size != find_width(graph):
        raise _unfit("several numbers of attention heads", cuts)
    return fitting[0]


def _unfit(got: str, cuts: tuple[Heads, ...]) -> StageError:
    listed = ", ".join(f"{cut.num_heads} heads of {cut.hidden_size // cut.num_heads}" for cut in cuts)
    return StageError(
        f"cannot fuse attention: {got}\n  expected {listed}, as in the graph's Reshape nodes",
        hint=f"fusion: {{num_heads: {cuts[0].num_heads:d}, hidden_size: {cuts[0].hidden_size:d}}}",
    )


def _without_cuts(user_heads: Heads, width: int) -> Heads:
    heads = Heads(user_heads.num_heads, user_heads.hidden_size or width)
    if not heads.num_heads or not heads.hidden_size or heads.hidden_size % heads.num_heads:
        raise StageError(
            "cannot fuse attention: no Reshape node shows the number of heads\n"
            f"  expected num_heads and hidden_size, got {heads.num_heads} and {heads.hidden_size}",
            hint="fusion: {num_heads: 12, hidden_size: 768}  (of the model; or disable: [attention])",
        )
    return heads


def find_heads(graph: onnx.GraphProto) -> tuple[Heads, ...]:
    """Returns every way in which a graph cuts tokens into heads, the likeliest first; () if there is none.

    A cut is a `Reshape` to [batch, sequence, heads, size], or to [batch, sequence, 3, heads, size] where
    queries, keys and values are one tensor, whose heads a `Transpose` then moves before the tokens. Its sizes
    may be one constant, or the last two parts of a `Concat`, and -1 for the number of heads means as many as
    make up the width of the normalisations. Cuts into heads that make up the width of the
    normalisations come first: those of keys and values may have fewer heads than those of queries.

    Args:
        graph: The graph; tensors of up to 16 elements must have their values.
    """
    constants = _constants(graph)
    producers = {name: node for node in graph.node for name in node.output}
    width = find_width(graph)
    cuts: Counter[Heads] = Counter()
    for node in graph.node:
        reshape = producers.get(node.input[0]) if node.op_type == "Transpose" else None
        if reshape is not None and reshape.op_type == "Reshape":
            sizes = _sizes(reshape.input[1], constants, producers)
            if _moves_heads(node, rank=len(sizes)):
                heads = width // sizes[-1] if sizes[-2] == -1 else sizes[-2]
                cuts[Heads(heads, heads * sizes[-1])] += 1
    cuts.pop(Heads(), None)
    return tuple(sorted(cuts, key=lambda cut: (cut.hidden_size != width, -cuts[cut], -cut.num_heads)))


def find_width(graph: onnx.GraphProto) -> int:
    """Returns how many features normalisations of a graph have, else its tables of embeddings, else 0."""
    dims = {weight.name: tuple(weight.dims) for weight in graph.initializer}
    # Scale and bias; of those with a skip, the second input is no initializer and the third is the scale.
    normalised = [name for node in graph.node if node.op_type in _NORMALISATIONS for name in node.input[1:3]]
    widths = Counter(dims[name][-1] for name in normalised if len(dims.get(name, ())) == 1)
    if not widths:
        tables = [dims.get(node.input[0], ()) for node in graph.node if node.op_type == "Gather"]
        widths = Counter(table[1] for table in tables if len(table) == 2)
    return max(widths, key=lambda size: (widths[size], size), default=0)


def _moves_heads(transpose: onnx.NodeProto, *, rank: int) -> bool:
    orders = [tuple(attribute.ints) for attribute in transpose.attribute if attribute.name == "perm"]
    return rank in (4, 5) and bool(orders) and len(orders[0]) == rank and orders[0][-2] != rank - 2


def _sizes(
    name: str, constants: Mapping[str, tuple[int, ...]], producers: Mapping[str, onnx.NodeProto]
) -> tuple[int, ...]:
    """Returns what a `Reshape` reshapes to, if the last two sizes are known, else ()."""
    sizes = constants.get(name)
    concat = producers.get(name)
    if sizes is None and concat is not None and concat.op_type == "Concat":
        sizes = tuple(size for part in concat.input for size in constants.get(part, (_UNKNOWN,)))
    is_known = sizes is not None and len(sizes) > 2 and sizes[-1] > 0 and sizes[-2] not in (0, _UNKNOWN)
    return sizes if sizes is not None and is_known else ()


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
