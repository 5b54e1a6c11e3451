"""What transformers have in common, written as exporters write it: unfused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.language.graph_builder import GraphBuilder

AS_ROWS, AS_COLUMNS = [0, 2, 1, 3], [0, 2, 3, 1]
"""Order of the axes of one head's tokens: [batch, heads, sequence, size], or the transpose for keys."""


@dataclass(frozen=True)
class Width:
    """Sizes that all layers of a transformer share.

    Attributes:
        hidden: Features per token.
        heads: Attention heads, which share the features among them.
        epsilon: Added to the variance in normalisations.
    """

    hidden: int
    heads: int
    epsilon: float


def add_layer_norm(
    b: GraphBuilder, value: str, scope: str, width: Width, *, output: str | None = None
) -> str:
    """Adds a normalisation over the last axis."""
    scale = b.weight(f"{scope}.weight", (width.hidden,), mean=1.0)
    bias = b.weight(f"{scope}.bias", (width.hidden,))
    name = output or f"{scope}/LayerNormalization"
    return b.node("LayerNormalization", [value, scale, bias], name, axis=-1, epsilon=width.epsilon)


def add_heads(b: GraphBuilder, value: str, scope: str, width: Width, order: list[int]) -> str:
    """Adds what cuts [batch, sequence, hidden] into heads; `order` is `AS_ROWS` or `AS_COLUMNS`."""
    sizes = np.array([0, 0, width.heads, width.hidden // width.heads], np.int64)
    value = b.node("Reshape", [value, b.constant("attention.split", sizes)], f"{scope}/Reshape")
    return b.node("Transpose", [value], f"{scope}/Transpose", perm=order)


def add_attention(b: GraphBuilder, heads: tuple[str, str, str], mask: str, scope: str, width: Width) -> str:
    """Adds scaled dot products of heads, the mask, and what joins the heads again: [batch, sequence, hidden].

    Args:
        b: The graph.
        heads: Queries as rows, keys as columns, values as rows.
        mask: Is added to the scores [batch, heads, sequence, sequence].
        scope: Start of the nodes' names.
        width: Sizes.
    """
    query, key, values = heads
    scores = b.node("MatMul", [query, key], f"{scope}/MatMul")
    root = b.constant("attention.scale", np.float32((width.hidden // width.heads) ** 0.5))
    scores = b.node("Div", [scores, root], f"{scope}/Div")
    scores = b.node("Add", [scores, mask], f"{scope}/Add")
    chances = b.node("Softmax", [scores], f"{scope}/Softmax", axis=-1)
    context = b.node("MatMul", [chances, values], f"{scope}/MatMul_1")
    context = b.node("Transpose", [context], f"{scope}/Transpose", perm=AS_ROWS)
    joined = b.constant("attention.joined", np.array([0, 0, width.hidden], np.int64))
    return b.node("Reshape", [context, joined], f"{scope}/Reshape")


def add_positions(b: GraphBuilder, scope: str, context: int) -> str:
    """Adds the numbers of the places of `input_ids`, [1, sequence], cut out of a table of all places."""
    ids = np.arange(context, dtype=np.int64)[None]
    length = add_length(b, scope)
    return add_cut(b, b.constant(f"{scope}.position_ids", ids), f"{scope}/Slice", length)


def add_length(b: GraphBuilder, scope: str) -> str:
    """Adds what tells how long the sequences of `input_ids` are, as a vector of one number."""
    shape = b.node("Shape", ["input_ids"], f"{scope}/Shape")
    axis = b.constant("one", np.array([1], np.int64))
    return b.node("Gather", [shape, axis], f"{scope}/length", axis=0)


def add_cut(b: GraphBuilder, value: str, name: str, length: str, *, axis: str = "one") -> str:
    """Adds what keeps the first `length` of an axis, whose number is the constant `axis`."""
    start = b.constant("zero", np.array([0], np.int64))
    return b.node("Slice", [value, start, length, axis], name)
