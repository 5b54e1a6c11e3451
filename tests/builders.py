"""Small models, one per shape of model that the build has to cope with.

Every builder returns an `onnx.ModelProto` whose weights are seeded, so that the same call always gives the
same model. `write_model` and `write_external_model` put one on disk.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortprep.stages.core.graph_walk import walk_initializers

OPSET = 17
"""Opset of the models here: every supported ONNX Runtime has it."""

IR_VERSION = 8
"""IR version that goes with it; the onnx package's default may be newer than an older ONNX Runtime reads."""


def write_model(model, path):
    """Writes a model with its weights inside; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def write_external_model(model, path, *, location="weights.bin"):
    """Writes a model with every weight of 64 bytes or more in one external file beside it; returns the path.

    Args:
        model: The model; it is left as it was.
        path: The model file.
        location: The external file, relative to the model's folder; may name a folder below it.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = bytearray()
    for tensor in walk_initializers(copy):
        values = numpy_helper.to_array(tensor).tobytes()
        if len(values) < 64:
            continue
        data.extend(bytes(-len(data) % 4096))
        point_outside(tensor, location, offset=len(data), length=len(values))
        data.extend(values)
    external = path.parent / location
    external.parent.mkdir(parents=True, exist_ok=True)
    external.write_bytes(data)
    return write_model(copy, path)


def point_outside(tensor, location, *, offset=None, length=None):
    """Makes a tensor refer to an external file instead of holding its values."""
    for field in ("raw_data", "float_data", "int32_data", "int64_data", "external_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))


def conv_net(*, channels=8, classes=10, batch="batch"):
    """Convolution, ReLU, pooling, Gemm, softmax: `image` [batch, 3, 16, 16] → `scores` [batch, classes]."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["image", "conv.w", "conv.b"], ["conv"], pads=[1, 1, 1, 1], name="conv"),
        helper.make_node("Relu", ["conv"], ["relu"], name="relu"),
        helper.make_node("GlobalAveragePool", ["relu"], ["pool"], name="pool"),
        helper.make_node("Flatten", ["pool"], ["flat"], name="flatten"),
        helper.make_node("Gemm", ["flat", "fc.w", "fc.b"], ["logits"], name="fc"),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=1, name="softmax"),
    ]
    weights = [
        tensor("conv.w", rng.normal(0, 0.3, (channels, 3, 3, 3)).astype(np.float32)),
        tensor("conv.b", rng.normal(0, 0.1, channels).astype(np.float32)),
        tensor("fc.w", rng.normal(0, 1, (channels, classes)).astype(np.float32)),
        tensor("fc.b", rng.normal(0, 0.1, classes).astype(np.float32)),
    ]
    return build_model(
        nodes,
        inputs=[value("image", TensorProto.FLOAT, [batch, 3, 16, 16])],
        outputs=[value("scores", TensorProto.FLOAT, [batch, classes])],
        initializers=weights,
    )


def two_inputs():
    """`left` and `right`, both [batch, 4], share their symbolic batch: `total` = (left + right) · W."""
    weight = np.random.default_rng(1).normal(0, 1, (4, 5)).astype(np.float32)
    nodes = [
        helper.make_node("Add", ["left", "right"], ["sum"]),
        helper.make_node("MatMul", ["sum", "w"], ["total"]),
    ]
    return build_model(
        nodes,
        inputs=[value(name, TensorProto.FLOAT, ["batch", 4]) for name in ("left", "right")],
        outputs=[value("total", TensorProto.FLOAT, ["batch", 5])],
        initializers=[tensor("w", weight)],
    )


def matmul_net(*, size=64, layers=2, seed=0):
    """`x` [batch, size] through `layers` square MatMuls to `y`: a model of a chosen weight size."""
    rng = np.random.default_rng(seed)
    names = ["x", *(f"h{i}" for i in range(1, layers)), "y"]
    nodes = [
        helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], name=f"matmul{i}")
        for i in range(layers)
    ]
    scale = np.float32(size**-0.5)
    weights = [tensor(f"w{i}", rng.standard_normal((size, size), np.float32) * scale) for i in range(layers)]
    return build_model(
        nodes,
        inputs=[value("x", TensorProto.FLOAT, ["batch", size])],
        outputs=[value("y", TensorProto.FLOAT, ["batch", size])],
        initializers=weights,
    )


def embedding():
    """`ids` [batch, length], each below 11, pick rows of a table; `mask` weighs them: `mean` [batch, 6]."""
    table = np.random.default_rng(2).normal(0, 1, (11, 6)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], axis=0),
        helper.make_node("Cast", ["mask"], ["weights"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["weights", "last"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["weighed"]),
        helper.make_node("ReduceMean", ["weighed"], ["mean"], axes=[1], keepdims=0),
    ]
    return build_model(
        nodes,
        inputs=[value(name, TensorProto.INT64, ["batch", "length"]) for name in ("ids", "mask")],
        outputs=[value("mean", TensorProto.FLOAT, ["batch", 6])],
        initializers=[tensor("table", table), tensor("last", np.array([-1], np.int64))],
    )


def if_net(*, size=4):
    """An `If` whose branches each hold an initializer of their own: `x` [batch, size] → `y` [batch, size].

    From a size of 4096 on, those are large enough to be written as external data.
    """

    def branch(name, scale):
        weight = tensor(f"{name}.w", scale + np.arange(size, dtype=np.float32) % 4)
        node = helper.make_node("Mul", ["x", f"{name}.w"], [f"{name}.y"])
        output = value(f"{name}.y", TensorProto.FLOAT, ["batch", size])
        return helper.make_graph([node], name, [], [output], initializer=[weight])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node(
            "If", ["positive"], ["y"], then_branch=branch("then", 2.0), else_branch=branch("else", -3.0)
        ),
    ]
    return build_model(
        nodes,
        inputs=[value("x", TensorProto.FLOAT, ["batch", size])],
        outputs=[value("y", TensorProto.FLOAT, ["batch", size])],
        initializers=[tensor("zero", np.float32(0.0))],
    )


def loop_net():
    """A `Loop` of three rounds whose body holds an initializer: `x` [4] → `y` = ((x·W + 1)·W + 1)·W + 1."""
    weight = np.random.default_rng(3).normal(0, 0.5, (4, 4)).astype(np.float32)
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go.next"]),
            helper.make_node("MatMul", ["state", "body.w"], ["product"]),
            helper.make_node("Add", ["product", "body.one"], ["state.next"]),
        ],
        "body",
        [
            value("round", TensorProto.INT64, []),
            value("go", TensorProto.BOOL, []),
            value("state", TensorProto.FLOAT, [4]),
        ],
        [value("go.next", TensorProto.BOOL, []), value("state.next", TensorProto.FLOAT, [4])],
        initializer=[tensor("body.w", weight), tensor("body.one", np.ones(4, np.float32))],
    )
    return build_model(
        [helper.make_node("Loop", ["rounds", "go0", "x"], ["y"], body=body)],
        inputs=[value("x", TensorProto.FLOAT, [4])],
        outputs=[value("y", TensorProto.FLOAT, [4])],
        initializers=[tensor("rounds", np.int64(3)), tensor("go0", np.bool_(True))],
    )


def half_net():
    """Everything float16: `x` [batch, 8] → `y` [batch, 4]."""
    weight = np.random.default_rng(4).normal(0, 0.5, (8, 4)).astype(np.float16)
    return build_model(
        [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Relu", ["product"], ["y"])],
        inputs=[value("x", TensorProto.FLOAT16, ["batch", 8])],
        outputs=[value("y", TensorProto.FLOAT16, ["batch", 4])],
        initializers=[tensor("w", weight)],
    )


def bfloat16_net():
    """bfloat16 weights, input and output around float32 arithmetic: `x` [2, 8] → `y` [2, 4]."""
    values = np.random.default_rng(5).normal(0, 0.5, (8, 4)).astype(np.float32)
    weight = TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=values.shape)
    weight.raw_data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    nodes = [
        helper.make_node("Cast", ["x"], ["x32"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["w"], ["w32"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x32", "w32"], ["y32"]),
        helper.make_node("Cast", ["y32"], ["y"], to=TensorProto.BFLOAT16),
    ]
    return build_model(
        nodes,
        inputs=[value("x", TensorProto.BFLOAT16, [2, 8])],
        outputs=[value("y", TensorProto.BFLOAT16, [2, 4])],
        initializers=[weight],
    )


def int8_net():
    """int8 weights behind `DequantizeLinear`, per channel: `x` [batch, 8] → `y` [batch, 4]."""
    rng = np.random.default_rng(6)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["w32"], axis=1),
        helper.make_node("MatMul", ["x", "w32"], ["y"]),
    ]
    weights = [
        tensor("w", rng.integers(-127, 128, (8, 4)).astype(np.int8)),
        tensor("scale", rng.uniform(0.01, 0.1, 4).astype(np.float32)),
        tensor("zero", np.zeros(4, np.int8)),
    ]
    return build_model(
        nodes,
        inputs=[value("x", TensorProto.FLOAT, ["batch", 8])],
        outputs=[value("y", TensorProto.FLOAT, ["batch", 4])],
        initializers=weights,
    )


def function_net():
    """A call of a function that the model itself defines: `x` [batch, 4] → `y` = relu(x) + x."""
    function = helper.make_function(
        "local",
        "ReluPlus",
        ["a"],
        ["b"],
        [helper.make_node("Relu", ["a"], ["r"]), helper.make_node("Add", ["r", "a"], ["b"])],
        [helper.make_opsetid("", OPSET)],
    )
    model = build_model(
        [helper.make_node("ReluPlus", ["x"], ["y"], domain="local")],
        inputs=[value("x", TensorProto.FLOAT, ["batch", 4])],
        outputs=[value("y", TensorProto.FLOAT, ["batch", 4])],
    )
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.functions.append(function)
    return model


def zero_inputs():
    """No input at all: `y` [3] is computed from initializers."""
    return build_model(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        inputs=[],
        outputs=[value("y", TensorProto.FLOAT, [3])],
        initializers=[tensor("a", np.arange(3, dtype=np.float32)), tensor("b", np.ones(3, np.float32))],
    )


def string_input():
    """`words` (string) [count] → `ids` (int64) [count]: "low" is 1, "high" 2, any other word 0."""
    node = helper.make_node(
        "LabelEncoder",
        ["words"],
        ["ids"],
        domain="ai.onnx.ml",
        keys_strings=["low", "high"],
        values_int64s=[1, 2],
        default_int64=0,
    )
    model = build_model(
        [node],
        inputs=[value("words", TensorProto.STRING, ["count"])],
        outputs=[value("ids", TensorProto.INT64, ["count"])],
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))
    return model


def sequence_input():
    """`items`, a sequence of float tensors, → `y`, its first: a kind of input that is not supported."""
    return build_model(
        [helper.make_node("SequenceAt", ["items", "first"], ["y"])],
        inputs=[helper.make_tensor_sequence_value_info("items", TensorProto.FLOAT, ["n"])],
        outputs=[value("y", TensorProto.FLOAT, ["n"])],
        initializers=[tensor("first", np.int64(0))],
    )


def optional_input():
    """`maybe`, an optional float tensor, → `y`: a kind of input that is not supported."""
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"]))
    return build_model(
        [helper.make_node("OptionalGetElement", ["maybe"], ["y"])],
        inputs=[helper.make_value_info("maybe", kind)],
        outputs=[value("y", TensorProto.FLOAT, ["n"])],
    )


def unknown_operator():
    """An operator that ai.onnx never had."""
    return _one_node(helper.make_node("Frobnicate", ["x"], ["y"]))


def _one_node(node):
    return build_model(
        [node],
        inputs=[value("x", TensorProto.FLOAT, ["batch", 4])],
        outputs=[value("y", TensorProto.FLOAT, ["batch", 4])],
    )


def build_model(nodes, *, inputs, outputs, initializers=()):
    """Puts a graph into a model of `OPSET` and `IR_VERSION`."""
    graph = helper.make_graph(
        list(nodes), "graph", list(inputs), list(outputs), initializer=list(initializers)
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = IR_VERSION
    return model


def value(name, kind, shape):
    """Describes an input or output."""
    return helper.make_tensor_value_info(name, kind, shape)


def tensor(name, values):
    """Makes an initializer."""
    return numpy_helper.from_array(np.asarray(values), name)
