import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnxruntime.transformers.float16 import convert_np_to_float16

from ortprep.stages.convert.half import BFLOAT16, FLOAT16, round_to_half
from ortprep.stages.convert.pass_records import PassRequest
from ortprep.stages.convert.passes import change_graph
from ortprep.stages.convert.weights import read_graph, read_pieces
from ortprep.stages.core.graph_walk import walk_graphs, walk_initializers
from tests import builders as models
from tests.builders import write_external_model, write_model

FLOAT = TensorProto.FLOAT
LEVELS = (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)


class Converted:
    """A model before and after."""

    def __init__(self, model, folder, *, external=False, **asked):
        write = write_external_model if external else write_model
        self.source = write(model, folder / "source" / "m.onnx")
        self.written = folder / "written" / "m.onnx"
        self.written.parent.mkdir(parents=True)
        name = asked.pop("name", "fp16")
        self.reply = change_graph(PassRequest(source=self.source, written=self.written, name=name, **asked))
        self.graph = read_graph(self.written)

    @property
    def operators(self):
        return [node.op_type for graph in walk_graphs(self.graph) for node in graph.node]

    def weight(self, name):
        """Element type and bytes of an initializer."""
        found = next(each for each in walk_initializers(self.graph) if each.name == name)
        return found.data_type, b"".join(read_pieces(found, self.written.parent))

    def assert_agrees(self, feeds, *, tolerance=4e-3):
        """Runs both, the converted one with and without optimisation."""
        (expected,) = run(self.source, feeds, LEVELS[1])
        for level in LEVELS:
            (got,) = run(self.written, feeds, level)
            scale = max(1.0, float(np.abs(expected).max(initial=0)))
            np.testing.assert_allclose(got.astype(np.float32), expected, rtol=0, atol=tolerance * scale)


def run(model, feeds, level):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    halves = {item.name for item in session.get_inputs() if item.type == "tensor(float16)"}
    given = {name: array.astype(np.float16) if name in halves else array for name, array in feeds.items()}
    return session.run(None, given)


def chain(*operators, weights=None):
    """`x` [4] through operators named `n0`, `n1`, … to `y` [4]; a pair has a weight for second input."""
    names = ["x", *(f"v{i}" for i in range(1, len(operators))), "y"]
    nodes = []
    for i, each in enumerate(operators):
        kind, *others = (each,) if isinstance(each, str) else each
        nodes.append(f"[n{i}] {names[i + 1]} = {kind} ({', '.join((names[i], *others))})")
    tensors = {name: np.asarray(numbers, np.float32) for name, numbers in (weights or {}).items()}
    return models.parse(f"(float[4] x) => (float[4] y) {{ {' '.join(nodes)} }}", **tensors)


def filled():
    """`y` = `x` + a tensor of [4] that ConstantOfShape fills."""
    return models.parse(
        """(float[4] x) => (float[4] y) <int64[1] shape = {4}> {
            c = ConstantOfShape <value = float[1] {0.5}> (shape)
            [n0] y = Add(x, c)
        }"""
    )


def sequence_net():
    """`y` is a number of `x`, by way of a sequence."""
    return models.parse(
        """(float[4] x) => (float y) <int64 one = {1}> {
            [n0] v1 = Relu(x)
            [n1] v2 = SplitToSequence <keepdims = 0> (v1)
            [n2] v3 = SequenceAt(v2, one)
            [n3] y = Neg(v3)
        }"""
    )


X4 = np.array([0.5, -1.25, 2.0, 3.5], np.float32)
RNG = np.random.default_rng(0)
CASES = [
    ("conv", models.conv_net(), {"image": RNG.random((2, 3, 16, 16), np.float32)}),
    ("matmul", models.matmul_net(), {"x": RNG.random((2, 64), np.float32)}),
    ("two inputs", models.two_inputs(), {name: RNG.random((2, 4), np.float32) for name in ("left", "right")}),
    ("embedding", models.embedding(), {"ids": np.array([[1, 2, 3]]), "mask": np.array([[1, 1, 0]])}),
    ("branches", models.if_net(size=5000), {"x": RNG.random((2, 5000), np.float32)}),
    ("loop", models.loop_net(), {"x": X4}),
    ("no inputs", models.zero_inputs(), {}),
    ("float16 already", models.half_net(), {"x": RNG.random((2, 8), np.float32).astype(np.float16)}),
    ("int8", models.int8_net(), {"x": RNG.random((2, 8), np.float32)}),
    ("filled", filled(), {"x": X4}),
    ("sequence", sequence_net(), {"x": X4}),
    ("function", models.function_net(), {"x": RNG.random((2, 4), np.float32)}),
]


@pytest.mark.parametrize("external", [False, True], ids=["inline", "external"])
@pytest.mark.parametrize(("model", "feeds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_answers_are_those_of_the_source_to_half_precision(model, feeds, external, tmp_path):
    converted = Converted(model, tmp_path, external=external)

    converted.assert_agrees(feeds)
    assert {path.name for path in converted.written.parent.iterdir()} <= {"m.onnx", "m.onnx.data"}


def test_weights_are_rounded_as_the_library_does():
    numbers = np.concatenate(
        [
            RNG.normal(0, 1, 1000),
            RNG.normal(0, 1e-7, 1000),
            RNG.normal(0, 6e4, 1000),
            [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-12, -1e-45, 65504, 65505, -3.4028235e38],
        ]
    ).astype(np.float32)

    got = round_to_half(numbers, FLOAT16)

    expected = convert_np_to_float16(numbers)
    assert got.tobytes() == expected.tobytes()


def test_bfloat16_rounds_to_nearest_even_and_never_to_infinity():
    largest = np.finfo(np.float32).max
    numbers = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1e-12, largest, -largest, np.inf, np.nan], np.float32)

    got = round_to_half(numbers, BFLOAT16)

    bits = got.view(np.uint16)[:6].tolist()
    assert bits == [0x3F80, 0x3F82, 0x2B8D, 0x7F7F, 0xFF7F, 0x7F80]
    assert np.isnan(got[6])


def test_a_value_between_kept_nodes_never_passes_through_half_precision(tmp_path):
    model = chain("Relu", ("Mul", "big"), ("Div", "big"), "Relu", weights={"big": 1e5})

    converted = Converted(model, tmp_path, keep_nodes=("n1", "n2"))

    converted.assert_agrees({"x": X4})
    assert converted.operators == ["Cast", "Relu", "Cast", "Mul", "Div", "Cast", "Relu", "Cast"]
    assert converted.weight("big") == (FLOAT, np.float32(1e5).tobytes())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", ["conv", "embedding", "branches", "loop", "int8"])
def test_whatever_nodes_are_kept_the_model_loads_and_agrees(case, seed, tmp_path):
    model, feeds = next((model, feeds) for name, model, feeds in CASES if name == case)
    rng = np.random.default_rng(seed)
    eligible = Converted(model, tmp_path / "all").reply.converted
    chosen = tuple(name for name in eligible if rng.random() < 0.5)

    converted = Converted(model, tmp_path / "some", keep_nodes=chosen)

    converted.assert_agrees(feeds)
    assert set(chosen) <= set(converted.reply.kept)


def test_what_subgraphs_hold_and_read_stays_float32(tmp_path):
    model = models.if_net(size=4)
    model.graph.node.insert(2, helper.make_node("Exp", ["x"], ["exp"], name="exp"))
    for attribute in model.graph.node[3].attribute:
        attribute.g.node[0].input[0] = "exp"

    converted = Converted(model, tmp_path)

    assert "exp" in converted.reply.converted
    assert [converted.weight(name)[0] for name in ("then_w", "else_w")] == [FLOAT, FLOAT]
    converted.assert_agrees({"x": X4[None]})


def test_weights_out_of_range_become_the_largest_number(tmp_path):
    lowest = np.finfo(np.float32).min  # as masks have it
    model = chain(("Add", "w"), ("Add", "mask"), weights={"w": [1e-9, -7e4, 1e5, -np.inf], "mask": [lowest]})

    converted = Converted(model, tmp_path)

    expected = np.array([5.96e-8, -65504, 65504, -np.inf], np.float16)
    assert converted.weight("w:float16") == (TensorProto.FLOAT16, expected.tobytes())
    assert converted.weight("mask:float16") == (TensorProto.FLOAT16, np.float16(-65504).tobytes())


def test_bfloat16_replaces_float32_and_leaves_float16_alone(tmp_path):
    weight = np.array([0.1, 0.2, 0.3, 1e30], np.float32)
    model = models.parse(
        """(float[4] x) => (float[4] y) <float[4] h = {1, 1, 1, 1}> {
            [n0] v1 = Add(x, w)
            [n1] v2 = Cast <to = 10> (v1)
            [n2] v3 = Cast <to = 1> (v2)
            [n3] y = Mul(v3, h)
        }""",
        w=weight,
    )

    converted = Converted(model, tmp_path, name="bf16")

    assert converted.weight("w:bfloat16") == (
        TensorProto.BFLOAT16,
        weight.astype(ml_dtypes.bfloat16).tobytes(),
    )
    kinds = [a.i for n in converted.graph.graph.node if n.op_type == "Cast" for a in n.attribute]
    assert kinds == [TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.BFLOAT16, FLOAT]
    onnx.checker.check_model(converted.graph, full_check=True)


def test_a_weight_that_a_kept_node_shares_with_others_is_not_rounded_for_it(tmp_path):
    weight = np.full((8, 8), 1 + 2**-20, np.float32)
    model = models.parse(
        """(float[batch, 8] x) => (float[batch, 8] y) {
            [converted] a = MatMul(x, w)
            [kept] y = MatMul(a, w)
        }""",
        w=weight,
    )
    converted = Converted(model, tmp_path, keep_nodes=("kept",))
    assert converted.weight("w") == (FLOAT, weight.tobytes())
    assert converted.weight("w:float16") == (TensorProto.FLOAT16, np.ones((8, 8), np.float16).tobytes())
    converted.assert_agrees({"x": np.ones((2, 8), np.float32)})
