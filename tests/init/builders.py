"""Models whose inputs a spec has to describe, each with one thing that `init` has to find out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.builders import Axis, build_model, tensor, value

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def fixed_size_classifier(side: int) -> onnx.ModelProto:
    """`image` [batch, 3, height, width] → `scores`, which takes images of one size only."""
    weights = np.zeros((4 * (side // 2) ** 2, 5), np.float32)
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["conv"], name="conv", strides=[2, 2], kernel_shape=[2, 2]),
        helper.make_node("Flatten", ["conv"], ["flat"], name="flat"),
        helper.make_node("Gemm", ["flat", "head"], ["scores"], name="head"),
    ]
    return build_model(
        nodes,
        inputs=[value("image", FLOAT, ["batch", 3, "height", "width"])],
        outputs=[value("scores", FLOAT, ["batch", 5])],
        initializers=[tensor("w", np.ones((4, 3, 2, 2), np.float32)), tensor("head", weights)],
    )


def skip_connection(stride: int) -> onnx.ModelProto:
    """`x` [1, 1, ?, ?] shrunk and grown by a stride and added to itself: sides have to be multiples of it."""
    shape = [stride, stride]
    nodes = [
        helper.make_node("MaxPool", ["x"], ["small"], name="shrink", kernel_shape=shape, strides=shape),
        helper.make_node("Resize", ["small", "", "scales"], ["large"], name="grow"),
        helper.make_node("Concat", ["x", "large"], ["y"], name="join", axis=1),
    ]
    scales = np.array([1, 1, stride, stride], np.float32)
    return build_model(
        nodes,
        inputs=[value("x", FLOAT, [1, 1, "?", "?"])],
        outputs=[value("y", FLOAT, [1, 2, None, None])],
        initializers=[tensor("scales", scales)],
    )


def text_encoder(*, vocabulary: int = 30, positions: int = 20, length: Axis = "sequence") -> onnx.ModelProto:
    """`input_ids` and `attention_mask` [batch, sequence]; a table of positions bounds the sequence."""
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["embedded"], name="words"),
        helper.make_node("Shape", ["input_ids"], ["length"], name="length", start=1, end=2),
        helper.make_node("Squeeze", ["length"], ["limit"], name="limit"),
        helper.make_node("Range", ["zero", "limit", "one"], ["places"], name="places"),
        helper.make_node("Gather", ["positions", "places"], ["placed"], name="positions"),
        helper.make_node("Add", ["embedded", "placed"], ["hidden"], name="add"),
        helper.make_node("Cast", ["attention_mask"], ["mask"], name="mask", to=FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["wide"], name="wide"),
        helper.make_node("Mul", ["hidden", "wide"], ["y"], name="masked"),
    ]
    rng = np.random.default_rng(0)
    return build_model(
        nodes,
        inputs=[value(name, INT64, ["batch", length]) for name in ("input_ids", "attention_mask")],
        outputs=[value("y", FLOAT, ["batch", length, 8])],
        initializers=[
            tensor("words", rng.normal(size=(vocabulary, 8)).astype(np.float32)),
            tensor("positions", rng.normal(size=(positions, 8)).astype(np.float32)),
            tensor("zero", np.array(0)),
            tensor("one", np.array(1)),
            tensor("last", np.array([2])),
        ],
    )


def voice_detector() -> onnx.ModelProto:
    """`audio` [?, ?], `state` [2, ?, 4] and `sr`: a branch per sample rate."""
    branch = [
        helper.make_graph(
            [helper.make_node("Mul", ["mean", name], [f"scaled_{name}"])],
            name,
            [],
            [value(f"scaled_{name}", FLOAT, None)],
            [tensor(name, np.array([factor], np.float32))],
        )
        for name, factor in (("fast", 2.0), ("slow", 3.0))
    ]
    nodes = [
        helper.make_node("Unsqueeze", ["audio", "one"], ["wave"], name="wave"),
        helper.make_node("Conv", ["wave", "w"], ["frames"], name="stft", kernel_shape=[64], strides=[32]),
        helper.make_node("ReduceMean", ["frames"], ["mean"], name="mean", axes=[1, 2], keepdims=0),
        helper.make_node("Equal", ["sr", "rate"], ["is_fast"], name="is_fast"),
        helper.make_node(
            "If", ["is_fast"], ["scaled"], name="rate", then_branch=branch[0], else_branch=branch[1]
        ),
        helper.make_node("Add", ["state", "scaled"], ["next"], name="next"),
    ]
    return build_model(
        nodes,
        inputs=[
            value("audio", FLOAT, ["?", "?"]),
            value("state", FLOAT, [2, "?", 4]),
            value("sr", INT64, []),
        ],
        outputs=[value("next", FLOAT, None)],
        initializers=[
            tensor("one", np.array([1])),
            tensor("rate", np.array(16000)),
            tensor("w", np.ones((4, 1, 64), np.float32)),
        ],
    )


def four_bits() -> onnx.ModelProto:
    """`x` [1, 4] of uint4 → `y`, the same as float32."""
    model = build_model(
        [helper.make_node("DequantizeLinear", ["x", "scale"], ["y"], name="widen")],
        inputs=[value("x", TensorProto.UINT4, [1, 4])],
        outputs=[value("y", FLOAT, [1, 4])],
        initializers=[tensor("scale", np.array(1, np.float32))],
    )
    model.opset_import[0].version, model.ir_version = 21, 10  # the first that have uint4
    return model


def compared_one_hot() -> onnx.ModelProto:
    """`bytes` [?, 8] → `y` [?, 8, 257], compared with 0 to 256: a one-hot encoding as JAX exports it."""
    nodes = [
        helper.make_node("Reshape", ["bytes", "column"], ["rows"], name="rows"),
        helper.make_node("Expand", ["rows", "one"], ["wide"], name="wide"),
        helper.make_node("Equal", ["wide", "classes"], ["is_class"], name="is_class"),
        helper.make_node("Cast", ["is_class"], ["y"], name="one_hot", to=FLOAT),
    ]
    return build_model(
        nodes,
        inputs=[value("bytes", TensorProto.INT32, ["batch", 8])],
        outputs=[value("y", FLOAT, ["batch", 8, 257])],
        initializers=[
            tensor("column", np.array([-1, 8, 1])),
            tensor("one", np.array([1, 1, 1])),
            tensor("classes", np.arange(257, dtype=np.int32).reshape(1, 1, 257)),
        ],
    )


def impossible() -> onnx.ModelProto:
    """`x` [rows, columns], of which no shape runs: it would need 15 elements and 16."""
    nodes = [
        helper.make_node("Reshape", ["x", "one"], ["first"], name="first"),
        helper.make_node("Reshape", ["x", "other"], ["second"], name="second"),
    ]
    return build_model(
        nodes,
        inputs=[value("x", FLOAT, ["rows", "columns"])],
        outputs=[value("first", FLOAT, [3, 5]), value("second", FLOAT, [2, 8])],
        initializers=[tensor("one", np.array([3, 5])), tensor("other", np.array([2, 8]))],
    )


def failing_without_inputs() -> onnx.ModelProto:
    """`y` [1], from no input at all; no run succeeds: it takes row 9 of a table of 4."""
    return build_model(
        [helper.make_node("Gather", ["table", "row"], ["y"], name="take")],
        inputs=[],
        outputs=[value("y", FLOAT, [1])],
        initializers=[tensor("table", np.zeros(4, np.float32)), tensor("row", np.array([9]))],
    )


def renamed(model: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    """Returns a model with another name for an input."""
    for item in model.graph.input:
        item.name = new if item.name == old else item.name
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = new if name == old else name
    return model


def copies(**inputs: tuple[int, Sequence[Axis]]) -> onnx.ModelProto:
    """Returns a model that gives its inputs back: what they are can be told by name, type and shape alone.

    Args:
        inputs: Element type and axes by name; `__` stands for a dot.
    """
    named = {name.replace("__", "."): declared for name, declared in inputs.items()}
    return build_model(
        [helper.make_node("Identity", [name], [f"{name}_copy"], name=name) for name in named],
        inputs=[value(name, kind, axes) for name, (kind, axes) in named.items()],
        outputs=[value(f"{name}_copy", kind, axes) for name, (kind, axes) in named.items()],
    )


def map_classifier() -> onnx.ModelProto:
    """`x` [1, 4] → `label` and `probabilities`, a list of maps as converters of scikit-learn make it."""
    ml = "ai.onnx.ml"
    coefficients = [float(one) for one in range(8)]
    classify = helper.make_node(
        "LinearClassifier",
        ["x"],
        ["label", "scores"],
        domain=ml,
        coefficients=coefficients,
        intercepts=[0.0, 1.0],
        classlabels_strings=["no", "yes"],
        post_transform="SOFTMAX",
    )
    zipped = helper.make_node(
        "ZipMap", ["scores"], ["probabilities"], domain=ml, classlabels_strings=["no", "yes"]
    )
    maps = helper.make_sequence_type_proto(
        helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(FLOAT, []))
    )
    graph = helper.make_graph(
        [classify, zipped],
        "classifier",
        [value("x", FLOAT, [1, 4])],
        [value("label", TensorProto.STRING, [1]), helper.make_value_info("probabilities", maps)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(ml, 1)], ir_version=8)
