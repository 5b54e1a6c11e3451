"""Small models, one per shape of model that the build has to cope with.

Every builder returns an `onnx.ModelProto` whose weights are seeded, so that the same call always gives the
same model. `write_model` and `write_external_model` put one on disk.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

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


def parse(text, **tensors):
    """Returns the model of a graph in ONNX's text form, with further initializers."""
    domains = [f', "{name}": {version}' for name, version in _DOMAINS.items() if f"{name}." in text]
    header = f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}{"".join(domains)}]> graph'
    model = parser.parse_model(f"{header} {text}")
    model.graph.initializer.extend(tensor(name, values) for name, values in tensors.items())
    return model


_DOMAINS = {"ai.onnx.ml": 2, "com.microsoft": 1, "local": 1}


def conv_net(*, channels=8, classes=10, batch="batch"):
    """Convolution, ReLU, pooling, Gemm, softmax: `image` [batch, 3, 16, 16] → `scores` [batch, classes]."""
    rng, batch = np.random.default_rng(0), "?" if batch is None else batch
    return parse(
        f"""(float[{batch}, 3, 16, 16] image) => (float[{batch}, {classes}] scores) {{
            [conv] conv = Conv <pads = [1, 1, 1, 1]> (image, conv_w, conv_b)
            [relu] relu = Relu(conv)
            [pool] pool = GlobalAveragePool(relu)
            [flatten] flat = Flatten(pool)
            [fc] logits = Gemm(flat, fc_w, fc_b)
            [softmax] scores = Softmax <axis = 1> (logits)
        }}""",
        conv_w=rng.normal(0, 0.3, (channels, 3, 3, 3)).astype(np.float32),
        conv_b=rng.normal(0, 0.1, channels).astype(np.float32),
        fc_w=rng.normal(0, 1, (channels, classes)).astype(np.float32),
        fc_b=rng.normal(0, 0.1, classes).astype(np.float32),
    )


def two_inputs():
    """`left` and `right`, both [batch, 4], share their symbolic batch: `total` = (left + right) · W."""
    return parse(
        """(float[batch, 4] left, float[batch, 4] right) => (float[batch, 5] total) {
            sum = Add(left, right)
            total = MatMul(sum, w)
        }""",
        w=np.random.default_rng(1).normal(0, 1, (4, 5)).astype(np.float32),
    )


def matmul_net(*, size=64, layers=2, seed=0):
    """`x` [batch, size] through `layers` square MatMuls to `y`: a model of a chosen weight size."""
    rng, scale = np.random.default_rng(seed), np.float32(size**-0.5)
    names = ["x", *(f"h{i}" for i in range(1, layers)), "y"]
    nodes = (f"[matmul{i}] {names[i + 1]} = MatMul({names[i]}, w{i})" for i in range(layers))
    return parse(
        f"(float[batch, {size}] x) => (float[batch, {size}] y) {{ {' '.join(nodes)} }}",
        **{f"w{i}": rng.standard_normal((size, size), np.float32) * scale for i in range(layers)},
    )


def embedding():
    """`ids` [batch, length], each below 11, pick rows of a table; `mask` weighs them: `mean` [batch, 6]."""
    return parse(
        """(int64[batch, length] ids, int64[batch, length] mask) => (float[batch, 6] mean)
        <int64[1] last = {-1}> {
            rows = Gather <axis = 0> (table, ids)
            weights = Cast <to = 1> (mask)
            column = Unsqueeze(weights, last)
            weighed = Mul(rows, column)
            mean = ReduceMean <axes = [1], keepdims = 0> (weighed)
        }""",
        table=np.random.default_rng(2).normal(0, 1, (11, 6)).astype(np.float32),
    )


def if_net(*, size=4):
    """An `If` whose branches each hold an initializer of their own: `x` [batch, size] → `y` [batch, size].

    From a size of 4096 on, those are large enough to be written as external data.
    """
    model = parse(
        f"""(float[batch, {size}] x) => (float[batch, {size}] y) <float zero = {{0}}> {{
            sum = ReduceSum <keepdims = 0> (x)
            positive = Greater(sum, zero)
            y = If (positive) <
                then_branch = then () => (float[batch, {size}] then_y) {{ then_y = Mul(x, then_w) }},
                else_branch = else () => (float[batch, {size}] else_y) {{ else_y = Mul(x, else_w) }}
            >
        }}"""
    )
    for branch, scale in zip(model.graph.node[2].attribute, (2.0, -3.0), strict=True):
        values = scale + np.arange(size, dtype=np.float32) % 4
        branch.g.initializer.append(tensor(f"{branch.g.name}_w", values))
    return model


def loop_net():
    """A `Loop` of three rounds whose body holds an initializer: `x` [4] → `y` = ((x·W + 1)·W + 1)·W + 1."""
    model = parse(
        """(float[4] x) => (float[4] y) <int64 rounds = {3}, bool go0 = {1}> {
            y = Loop (rounds, go0, x) <
                body = body (int64 round, bool go, float[4] state) => (bool go_next, float[4] next)
                <float[4] one = {1, 1, 1, 1}> {
                    go_next = Identity(go)
                    product = MatMul(state, w)
                    next = Add(product, one)
                }
            >
        }"""
    )
    weight = np.random.default_rng(3).normal(0, 0.5, (4, 4)).astype(np.float32)
    model.graph.node[0].attribute[0].g.initializer.append(tensor("w", weight))
    return model


def half_net():
    """Everything float16: `x` [batch, 8] → `y` [batch, 4]."""
    return parse(
        "(float16[batch, 8] x) => (float16[batch, 4] y) { product = MatMul(x, w) y = Relu(product) }",
        w=np.random.default_rng(4).normal(0, 0.5, (8, 4)).astype(np.float16),
    )


def bfloat16_net():
    """bfloat16 weights, input and output around float32 arithmetic: `x` [2, 8] → `y` [2, 4]."""
    model = parse(
        """(bfloat16[2, 8] x) => (bfloat16[2, 4] y) {
            x32 = Cast <to = 1> (x)
            w32 = Cast <to = 1> (w)
            y32 = MatMul(x32, w32)
            y = Cast <to = 16> (y32)
        }"""
    )
    values = np.random.default_rng(5).normal(0, 0.5, (8, 4)).astype(np.float32)
    weight = model.graph.initializer.add(name="w", data_type=TensorProto.BFLOAT16, dims=values.shape)
    weight.raw_data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return model


def int8_net():
    """int8 weights behind `DequantizeLinear`, per channel: `x` [batch, 8] → `y` [batch, 4]."""
    rng = np.random.default_rng(6)
    return parse(
        """(float[batch, 8] x) => (float[batch, 4] y) {
            w32 = DequantizeLinear <axis = 1> (w, scale, zero)
            y = MatMul(x, w32)
        }""",
        w=rng.integers(-127, 128, (8, 4)).astype(np.int8),
        scale=rng.uniform(0.01, 0.1, 4).astype(np.float32),
        zero=np.zeros(4, np.int8),
    )


def function_net():
    """A call of a function that the model itself defines: `x` [batch, 4] → `y` = relu(x) + x."""
    return parse(
        """(float[batch, 4] x) => (float[batch, 4] y) { y = local.ReluPlus(x) }
        <domain: "local", opset_import: ["": 17]> ReluPlus (a) => (b) { r = Relu(a) b = Add(r, a) }"""
    )


def zero_inputs():
    """No input at all: `y` [3] is computed from initializers."""
    return parse("() => (float[3] y) <float[3] a = {0, 1, 2}, float[3] b = {1, 1, 1}> { y = Add(a, b) }")


def string_input():
    """`words` (string) [count] → `ids` (int64) [count]: "low" is 1, "high" 2, any other word 0."""
    return parse(
        """(string[count] words) => (int64[count] ids) {
            ids = ai.onnx.ml.LabelEncoder
                <keys_strings = ["low", "high"], values_int64s = [1, 2], default_int64 = 0> (words)
        }"""
    )


def sequence_input():
    """`items`, a sequence of float tensors, → `y`, its first: a kind of input that is not supported."""
    return parse("(seq(float[n]) items) => (float[n] y) <int64 first = {0}> { y = SequenceAt(items, first) }")


def optional_input():
    """`maybe`, an optional float tensor, → `y`: a kind of input that is not supported."""
    return parse("(optional(float[n]) maybe) => (float[n] y) { y = OptionalGetElement(maybe) }")


def unknown_operator():
    """An operator that ai.onnx never had."""
    return parse("(float[batch, 4] x) => (float[batch, 4] y) { y = Frobnicate(x) }")


def value(name, kind, shape):
    """Describes an input or output."""
    return helper.make_tensor_value_info(name, kind, shape)


def tensor(name, values):
    """Makes an initializer."""
    return numpy_helper.from_array(np.asarray(values), name)
