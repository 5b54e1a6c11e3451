"""GPT-2 small (Radford et al., 2019) as exporters write it: unfused."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import TensorProto

from bench.language.graph_builder import INITIAL_SPREAD, GraphBuilder, floats, tokens
from bench.language.transformer import (
    AS_COLUMNS,
    AS_ROWS,
    Width,
    add_attention,
    add_cut,
    add_heads,
    add_layer_norm,
    add_length,
    add_positions,
)

LAYERS, HIDDEN, HEADS, INTERMEDIATE = 12, 768, 12, 3072
VOCABULARY, POSITIONS = 50257, 1024
_WIDTH = Width(HIDDEN, HEADS, epsilon=1e-5)

_INTO_RESIDUAL = INITIAL_SPREAD / math.sqrt(2 * LAYERS)
"""Spread of weights whose product is added to the residual stream, which 2 × 12 of them make up."""


def build_gpt2() -> onnx.ModelProto:
    """Returns GPT-2 small with its 124 million weights.

    The table of words is also the matrix of the head, through a `Transpose` as exporters leave it.
    Constant folding, if it is on, makes a second copy of it.

    Inputs `input_ids` and `attention_mask`: int64 [batch, sequence], sequence up to 1024.
    Output `logits` [batch, sequence, 50257].
    """
    b = GraphBuilder()
    words = b.weight("transformer.wte.weight", (VOCABULARY, HIDDEN))
    value = _embeddings(b, words)
    mask = _mask(b)
    for index in range(LAYERS):
        value = _layer(b, value, mask, f"transformer.h.{index}")
    value = add_layer_norm(b, value, "transformer.ln_f", _WIDTH)
    columns = b.node("Transpose", [words], "lm_head/Transpose", perm=[1, 0])
    b.node("MatMul", [value, columns], "logits")
    logits = floats("logits", ["batch", "sequence", VOCABULARY])
    return b.build("gpt2", tokens("input_ids", "attention_mask"), [logits])


def _embeddings(b: GraphBuilder, words: str) -> str:
    positions = b.weight("transformer.wpe.weight", (POSITIONS, HIDDEN), spread=INITIAL_SPREAD / 2)
    ids = add_positions(b, "transformer", POSITIONS)
    word = b.node("Gather", [words, "input_ids"], "transformer/words", axis=0)
    place = b.node("Gather", [positions, ids], "transformer/positions", axis=0)
    return b.node("Add", [word, place], "transformer/Add")


def _mask(b: GraphBuilder) -> str:
    """Adds what is summed to attention scores, [batch, 1, sequence, sequence]: 0 to attend, lowest not to."""
    length = add_length(b, "mask")
    earlier = b.constant("mask.earlier", np.tri(POSITIONS, dtype=np.bool_)[None, None])
    for axis in (2, 3):
        number = b.constant(f"mask.axis_{axis}", np.array([axis], np.int64))
        earlier = add_cut(b, earlier, f"mask/Slice_{axis}", length, axis=number)
    axes = b.constant("mask.axes", np.array([1, 2], np.int64))
    real = b.node("Unsqueeze", ["attention_mask", axes], "mask/Unsqueeze")
    real = b.node("Cast", [real], "mask/Cast", to=TensorProto.BOOL)
    seen = b.node("And", [earlier, real], "mask/And")
    none, lowest = np.float32(0), np.finfo(np.float32).min
    return b.node(
        "Where", [seen, b.constant("mask.none", none), b.constant("mask.low", lowest)], "mask/Where"
    )


def _layer(b: GraphBuilder, value: str, mask: str, scope: str) -> str:
    normal = add_layer_norm(b, value, f"{scope}.ln_1", _WIDTH)
    attended = _attention(b, normal, mask, f"{scope}.attn")
    value = b.node("Add", [attended, value], f"{scope}/Add")
    normal = add_layer_norm(b, value, f"{scope}.ln_2", _WIDTH)
    inner = _product(b, normal, f"{scope}.mlp.c_fc", (HIDDEN, INTERMEDIATE))
    inner = _gelu(b, inner, f"{scope}.mlp")
    outer = _product(b, inner, f"{scope}.mlp.c_proj", (INTERMEDIATE, HIDDEN), spread=_INTO_RESIDUAL)
    return b.node("Add", [value, outer], f"{scope}/Add_1")


def _attention(b: GraphBuilder, value: str, mask: str, scope: str) -> str:
    joint = _product(b, value, f"{scope}.c_attn", (HIDDEN, 3 * HIDDEN))
    names = [f"{scope}/{part}" for part in ("query", "key", "value")]
    sizes = b.constant("attention.sizes", np.array([HIDDEN] * 3, np.int64))
    b.node_of("Split", [joint, sizes], names, f"{scope}/Split", axis=-1)
    orders = (AS_ROWS, AS_COLUMNS, AS_ROWS)
    query, key, values = (add_heads(b, n, n, _WIDTH, order) for n, order in zip(names, orders, strict=True))
    context = add_attention(b, (query, key, values), mask, scope, _WIDTH)
    return _product(b, context, f"{scope}.c_proj", (HIDDEN, HIDDEN), spread=_INTO_RESIDUAL)


def _product(
    b: GraphBuilder, value: str, scope: str, sizes: tuple[int, int], *, spread: float = INITIAL_SPREAD
) -> str:
    """Adds a product with a bias as GPT-2's `Conv1D` is exported: a `Gemm` of all tokens in one matrix."""
    shape = b.node("Shape", [value], f"{scope}/Shape")
    outer = b.node("Gather", [shape, b.constant("first_two", np.array([0, 1], np.int64))], f"{scope}/Gather")
    last = b.constant(f"last.{sizes[1]}", np.array([sizes[1]], np.int64))
    back = b.node("Concat", [outer, last], f"{scope}/Concat", axis=0)
    flat = b.constant(f"flat.{sizes[0]}", np.array([-1, sizes[0]], np.int64))
    rows = b.node("Reshape", [value, flat], f"{scope}/Reshape")
    weight = b.weight(f"{scope}.weight", sizes, spread=spread)
    product = b.node("Gemm", [rows, weight, b.weight(f"{scope}.bias", sizes[1:])], f"{scope}/Gemm")
    return b.node("Reshape", [product, back], f"{scope}/Reshape_1")


def _gelu(b: GraphBuilder, value: str, scope: str) -> str:
    """Adds the approximation by a hyperbolic tangent (Hendrycks and Gimpel, 2016, arXiv:1606.08415)."""
    cube = b.node("Pow", [value, b.constant("gelu.three", np.float32(3))], f"{scope}/Pow")
    cube = b.node("Mul", [cube, b.constant("gelu.cubic", np.float32(0.044715))], f"{scope}/Mul")
    inner = b.node("Add", [value, cube], f"{scope}/Add")
    root = b.constant("gelu.root", np.float32(math.sqrt(2 / math.pi)))
    inner = b.node("Tanh", [b.node("Mul", [inner, root], f"{scope}/Mul_1")], f"{scope}/Tanh")
    raised = b.node("Add", [inner, b.constant("gelu.one", np.float32(1))], f"{scope}/Add_1")
    half = b.node("Mul", [value, b.constant("gelu.half", np.float32(0.5))], f"{scope}/Mul_2")
    return b.node("Mul", [half, raised], f"{scope}/Mul_3")
