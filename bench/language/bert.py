"""BERT-base (Devlin et al., 2018, arXiv:1810.04805) as exporters write it: unfused."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from bench.language.graph_builder import GraphBuilder, floats, tokens
from bench.language.transformer import (
    AS_COLUMNS,
    AS_ROWS,
    Width,
    add_attention,
    add_heads,
    add_layer_norm,
    add_positions,
)

LAYERS, HIDDEN, HEADS, INTERMEDIATE = 12, 768, 12, 3072
VOCABULARY, POSITIONS, TYPES = 30522, 512, 2
_WIDTH = Width(HIDDEN, HEADS, epsilon=1e-12)


def build_bert() -> onnx.ModelProto:
    """Returns BERT-base with its 109 million weights.

    Inputs `input_ids`, `attention_mask`, `token_type_ids`: int64 [batch, sequence], sequence up to 512.
    Outputs `last_hidden_state` [batch, sequence, 768] and `pooler_output` [batch, 768].
    """
    b = GraphBuilder()
    value = _embeddings(b)
    mask = _mask(b)
    for index in range(LAYERS):
        last = index == LAYERS - 1
        value = _layer(b, value, mask, f"encoder.layer.{index}", output="last_hidden_state" if last else None)
    _pooler(b, value)
    return b.build(
        "bert-base",
        tokens("input_ids", "attention_mask", "token_type_ids"),
        [
            floats("last_hidden_state", ["batch", "sequence", HIDDEN]),
            floats("pooler_output", ["batch", HIDDEN]),
        ],
    )


def _embeddings(b: GraphBuilder) -> str:
    words = b.weight("embeddings.word_embeddings.weight", (VOCABULARY, HIDDEN))
    types = b.weight("embeddings.token_type_embeddings.weight", (TYPES, HIDDEN))
    positions = b.weight("embeddings.position_embeddings.weight", (POSITIONS, HIDDEN))
    ids = add_positions(b, "embeddings", POSITIONS)
    word = b.node("Gather", [words, "input_ids"], "embeddings/words", axis=0)
    kind = b.node("Gather", [types, "token_type_ids"], "embeddings/types", axis=0)
    place = b.node("Gather", [positions, ids], "embeddings/positions", axis=0)
    total = b.node("Add", [word, kind], "embeddings/Add")
    total = b.node("Add", [total, place], "embeddings/Add_1")
    return add_layer_norm(b, total, "embeddings.LayerNorm", _WIDTH)


def _mask(b: GraphBuilder) -> str:
    """Adds what is summed to attention scores, [batch, 1, 1, sequence]: 0 to attend, very negative not to."""
    axes = b.constant("mask.axes", np.array([1, 2], np.int64))
    mask = b.node("Unsqueeze", ["attention_mask", axes], "mask/Unsqueeze")
    mask = b.node("Cast", [mask], "mask/Cast", to=TensorProto.FLOAT)
    mask = b.node("Sub", [b.constant("mask.one", np.float32(1)), mask], "mask/Sub")
    return b.node("Mul", [mask, b.constant("mask.low", np.float32(-10000))], "mask/Mul")


def _layer(b: GraphBuilder, value: str, mask: str, scope: str, *, output: str | None) -> str:
    attended = _attention(b, value, mask, f"{scope}.attention")
    inner = b.linear(attended, f"{scope}.intermediate.dense", (HIDDEN, INTERMEDIATE))
    inner = _gelu(b, inner, f"{scope}.intermediate")
    outer = b.linear(inner, f"{scope}.output.dense", (INTERMEDIATE, HIDDEN))
    total = b.node("Add", [outer, attended], f"{scope}.output/Add")
    return add_layer_norm(b, total, f"{scope}.output.LayerNorm", _WIDTH, output=output)


def _attention(b: GraphBuilder, value: str, mask: str, scope: str) -> str:
    parts = []
    for name, order in (("query", AS_ROWS), ("key", AS_COLUMNS), ("value", AS_ROWS)):
        part = b.linear(value, f"{scope}.self.{name}", (HIDDEN, HIDDEN))
        parts.append(add_heads(b, part, f"{scope}.self.{name}", _WIDTH, order))
    query, key, values = parts
    context = add_attention(b, (query, key, values), mask, f"{scope}.self", _WIDTH)
    context = b.linear(context, f"{scope}.output.dense", (HIDDEN, HIDDEN))
    total = b.node("Add", [context, value], f"{scope}.output/Add")
    return add_layer_norm(b, total, f"{scope}.output.LayerNorm", _WIDTH)


def _gelu(b: GraphBuilder, value: str, scope: str) -> str:
    root = b.constant("gelu.root", np.float32(2**0.5))
    scaled = b.node("Div", [value, root], f"{scope}/Div")
    erf = b.node("Erf", [scaled], f"{scope}/Erf")
    raised = b.node("Add", [erf, b.constant("gelu.one", np.float32(1))], f"{scope}/Add")
    product = b.node("Mul", [value, raised], f"{scope}/Mul")
    return b.node("Mul", [product, b.constant("gelu.half", np.float32(0.5))], f"{scope}/Mul_1")


def _pooler(b: GraphBuilder, value: str) -> None:
    first = b.constant("pooler.first", np.int64(0))
    token = b.node("Gather", [value, first], "pooler/Gather", axis=1)
    b.node("Tanh", [b.linear(token, "pooler.dense", (HIDDEN, HIDDEN))], "pooler_output")
