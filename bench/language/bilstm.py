"""A tagger of two bidirectional LSTM layers (Huang et al., 2015, arXiv:1508.01991)."""

from __future__ import annotations

import math

import numpy as np
import onnx

from bench.language.graph_builder import GraphBuilder, floats, tokens

LAYERS, FEATURES, HIDDEN = 2, 300, 512
VOCABULARY, TAGS = 20000, 17
"""As many tags as the universal set of parts of speech has."""

_DIRECTIONS, _GATES = 2, 4


def build_bilstm() -> onnx.ModelProto:
    """Returns the tagger with its 16 million weights.

    Input `input_ids`: int64 [batch, sequence]. Output `scores` [batch, sequence, 17], one per tag.
    """
    b = GraphBuilder()
    words = b.weight("embedding.weight", (VOCABULARY, FEATURES), spread=1.0)
    value = b.node("Gather", [words, "input_ids"], "embedding/Gather", axis=0)
    value = b.node("Transpose", [value], "embedding/Transpose", perm=[1, 0, 2])
    state = _initial_state(b, value)
    for index in range(LAYERS):
        features = FEATURES if index == 0 else _DIRECTIONS * HIDDEN
        value = _layer(b, value, state, f"lstm.{index}", features)
    value = b.node("Transpose", [value], "head/Transpose", perm=[1, 0, 2])
    b.linear(value, "head", (_DIRECTIONS * HIDDEN, TAGS), spread=1 / math.sqrt(HIDDEN), output="scores")
    return b.build("bilstm", tokens("input_ids"), [floats("scores", ["batch", "sequence", TAGS])])


def _initial_state(b: GraphBuilder, value: str) -> str:
    """Adds zeros, [2, batch, 512], for a value [sequence, batch, features]; exporters do it this way."""
    shape = b.node("Shape", [value], "state/Shape")
    batch = b.node("Gather", [shape, b.constant("one", np.array([1], np.int64))], "state/batch", axis=0)
    directions = b.constant("state.directions", np.array([_DIRECTIONS], np.int64))
    hidden = b.constant("state.hidden", np.array([HIDDEN], np.int64))
    sizes = b.node("Concat", [directions, batch, hidden], "state/Concat", axis=0)
    return b.node("Expand", [b.constant("state.zero", np.float32(0)), sizes], "state/Expand")


def _layer(b: GraphBuilder, value: str, state: str, scope: str, features: int) -> str:
    """Adds a layer that reads and returns [sequence, batch, features], the directions' side by side."""
    gates = _GATES * HIDDEN
    weights = [
        b.weight(f"{scope}.{name}", (_DIRECTIONS, *dims), spread=1 / math.sqrt(HIDDEN), uniform=True)
        for name, dims in (("W", (gates, features)), ("R", (gates, HIDDEN)), ("B", (2 * gates,)))
    ]
    # The empty name stands for the sequences' lengths, which are all the same.
    inputs = [value, *weights, "", state, state]
    both = b.node("LSTM", inputs, f"{scope}/LSTM", hidden_size=HIDDEN, direction="bidirectional")
    both = b.node("Transpose", [both], f"{scope}/Transpose", perm=[0, 2, 1, 3])
    joined = b.constant("lstm.joined", np.array([0, 0, -1], np.int64))
    return b.node("Reshape", [both, joined], f"{scope}/Reshape")
