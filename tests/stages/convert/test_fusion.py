"""Fusing transformers: the answers and the interface stay, and what cannot be done is said, never guessed."""

import importlib.util
import os
import time

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from bench.language import bert, gpt2
from bench.language.transformer import Width
from ortprep.children.child import run_child
from ortprep.errors import PipelineError, StageError
from ortprep.spec.conversion import FusionSpec
from ortprep.spec.models import ModelSpec
from ortprep.stages.convert import passes
from ortprep.stages.convert.fusion import rewrite_as_patterns_expect
from ortprep.stages.convert.pass_records import PassRequest
from ortprep.stages.convert.passes import change_graph
from ortprep.stages.convert.weights import EXTERNAL_BYTES, read_graph, read_pieces, write_tensor
from ortprep.stages.core.contract import Context, Plan
from ortprep.stages.core.graph_walk import name_nodes, walk_initializers
from tests import builders as models
from tests.builders import if_net, matmul_net, tensor, write_external_model, write_model

WIDTH, HEADS = 32, 4
WITH_TOOLS = importlib.util.find_spec("onnxruntime_tools") is not None


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    """BERT and GPT-2 as the benchmarks have them, but with two narrow layers; BERT's weights are outside."""
    folder = tmp_path_factory.mktemp("transformers")
    sizes = {"LAYERS": 2, "HIDDEN": WIDTH, "HEADS": HEADS, "INTERMEDIATE": 64, "VOCABULARY": 50}
    with pytest.MonkeyPatch.context() as patch:
        for module, epsilon in ((bert, 1e-12), (gpt2, 1e-5)):
            for name, size in {**sizes, "POSITIONS": 16}.items():
                patch.setattr(module, name, size)
            patch.setattr(module, "_WIDTH", Width(WIDTH, HEADS, epsilon=epsilon))
        whole = bert.build_bert()
        onnx.save(gpt2.build_gpt2(), folder / "gpt2.onnx")
    models.write_external_model(whole, folder / "bert.onnx")
    return {"bert": folder / "bert.onnx", "gpt2": folder / "gpt2.onnx"}


def fuse(source, written, model_type, **fields):
    fusion = FusionSpec(model_type=model_type, **{"num_heads": HEADS, "hidden_size": WIDTH, **fields})
    request = PassRequest(name="fusion", source=source, written=written, fusion=fusion)
    # One process has one library, and it takes as long to import as all that is done with it here.
    here = fusion.library == "onnxruntime"
    return change_graph(request) if here else run_child(change_graph, request, timeout_s=600).value


def answer(path):
    """What a model says to a batch of which one text is padded on its left, every node as it is written."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    tokens = np.random.default_rng(0).integers(0, 50, (2, 8))
    mask = np.array([[1] * 8, [0] * 3 + [1] * 5])
    feeds = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": tokens % 2}
    feeds["unread"] = np.zeros(1, np.float32)
    return list(session.run(None, {one.name: feeds[one.name] for one in session.get_inputs()}))


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("bert", {"Attention": 2, "BiasGelu": 2, "SkipLayerNormalization": 4}),
        ("gpt2", {"FastGelu": 2, "SkipLayerNormalization": 4}),
    ],
)
def test_a_fused_transformer_answers_as_its_source_by_the_same_interface(transformers, tmp_path, name, fused):
    model = onnx.load(transformers[name])
    if name == "gpt2":  # an input that nothing reads is kept
        model.graph.input.insert(0, models.value("unread", TensorProto.FLOAT, [1]))
    source, written = models.write_model(model, tmp_path / "source" / "model.onnx"), tmp_path / "model.onnx"

    assert fuse(source, written, name).fused == fused
    after = onnx.load(written, load_external_data=False).graph
    assert list(after.input) == list(model.graph.input)
    assert list(after.output) == list(model.graph.output)
    for got, expected in zip(answer(written), answer(transformers[name]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "brt"}, "did you mean 'bert'"),
        ({"model_type": "bert", "disable": ("atention",)}, "did you mean 'attention'"),
        ({"model_type": "bert", "num_heads": 0}, "num_heads 0, hidden_size 32\n  expected both to be set"),
        # Of images: its attention has no mask.
        ({"model_type": "vit"}, "fusion changed inputs of the model: attention_mask"),
    ],
)
def test_what_would_be_wrong_is_refused_and_nothing_is_written(transformers, tmp_path, fields, said):
    with pytest.raises(PipelineError, match=said) as error:
        fuse(transformers["bert"], tmp_path / "model.onnx", **fields)
    assert "fusion: {" in error.value.hint
    assert list(tmp_path.iterdir()) == []


def test_fusing_nothing_is_an_error(tmp_path):
    source = models.write_model(models.conv_net(), tmp_path / "source" / "model.onnx")
    with pytest.raises(StageError, match="found nothing to fuse: model_type swin"):
        fuse(source, tmp_path / "model.onnx", "swin")
    assert not (tmp_path / "model.onnx").exists()


def test_rewriting_scores_and_masks_leaves_answers_as_they_are(tmp_path):
    model = models.parse(
        """(float[2, 3, 4, 4] x, float[2, 4] mask) => (float[2, 3, 4, 4] y)
        <float scale = {0.125}, float low = {-100}, int64[2] axes = {2, 1}> {
            [product] product = MatMul(x, x)
            [scaled] scores = Mul(product, scale)
            [unsqueeze] column = Unsqueeze(mask, axes)
            [lowered] low_mask = Mul(column, low)
            [masked] masked = Add(scores, low_mask)
            [softmax] y = Softmax <axis = -1> (masked)
        }"""
    )
    source = models.write_model(model, tmp_path / "source.onnx")
    rewrite_as_patterns_expect(model.graph)
    written = models.write_model(model, tmp_path / "model.onnx")
    assert [node.op_type for node in model.graph.node] == [
        *("MatMul", "Div", "Unsqueeze", "Unsqueeze", "Mul", "Add", "Softmax")
    ]
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(2, 3, 4, 4)).astype(np.float32), "mask": np.eye(2, 4, dtype=np.float32)}
    before, after = (
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)
        for path in (source, written)
    )
    np.testing.assert_array_equal(after[0], before[0])


# -- test_weights


def values_of(model, folder):
    return {each.name: b"".join(read_pieces(each, folder)) for each in walk_initializers(model)}


def expected_values(model):
    return {each.name: numpy_helper.to_array(each).tobytes() for each in walk_initializers(model)}


@pytest.mark.parametrize("model", [matmul_net(size=128), if_net(size=8192)], ids=["main graph", "branches"])
def test_values_are_read_wherever_they_lie(model, tmp_path):
    expected = expected_values(model)

    inline = write_model(model, tmp_path / "inline" / "m.onnx")
    external = write_external_model(model, tmp_path / "external" / "m.onnx", location="data/w.bin")

    assert values_of(read_graph(inline), inline.parent) == expected
    assert values_of(read_graph(external), external.parent) == expected


@pytest.mark.parametrize("ir_version", [3, 4])
def test_initializers_that_callers_may_override_are_refused(tmp_path, ir_version):
    """Before version 4 of the format every initializer is an input too, and a constant all the same."""
    model = matmul_net(layers=2)
    model.ir_version = ir_version
    model.graph.input.append(models.value("w1", TensorProto.FLOAT, [64, 64]))
    path = write_model(model, tmp_path / "m.onnx")
    if ir_version == 3:
        assert [one.name for one in read_graph(path).graph.input] == ["x"]
        return
    with pytest.raises(StageError, match="initializers that callers may override: w1"):
        read_graph(path)


def test_external_data_that_is_short_missing_or_of_another_length_is_reported(tmp_path):
    path = write_external_model(matmul_net(layers=1), tmp_path / "m.onnx")
    graph = read_graph(path)
    graph.graph.initializer[0].dims[0] = 63
    with pytest.raises(StageError, match=r"tensor 'w0'\n  expected 16128 bytes .* a length of 16384"):
        values_of(graph, tmp_path)

    os.truncate(tmp_path / "weights.bin", 100)
    with pytest.raises(StageError, match=r"tensor 'w0'\n  expected 16384 bytes .* got 100 in "):
        values_of(read_graph(path), tmp_path)

    (tmp_path / "weights.bin").unlink()
    with pytest.raises(StageError, match=r"tensor 'w0'\n.* got 0 in "):
        values_of(read_graph(path), tmp_path)


def test_what_is_written_is_read_back_aligned_and_small_tensors_stay_inside(tmp_path):
    sizes = {"small": EXTERNAL_BYTES // 4 - 1, "odd": EXTERNAL_BYTES // 4 + 1, "next": 1000}
    tensors = [tensor(name, np.arange(size, dtype=np.float32)) for name, size in sizes.items()]
    model = onnx.ModelProto(graph=onnx.GraphProto(initializer=tensors))
    for each in model.graph.initializer:
        write_tensor(each, [numpy_helper.to_array(each).tobytes()], tmp_path / "m.onnx")

    offsets = {
        each.name: int({entry.key: entry.value for entry in each.external_data}["offset"])
        for each in model.graph.initializer
        if each.data_location == TensorProto.EXTERNAL
    }
    assert list(offsets) == ["odd", "next"]
    assert [offset % 64 for offset in offsets.values()] == [0, 0]
    assert values_of(model, tmp_path) == {
        each.name: numpy_helper.to_array(each).tobytes() for each in tensors
    }


# -- names that a pass gives to nodes


@pytest.mark.attack
def test_a_model_of_many_nodes_without_names_is_named_in_one_go():
    """Looking for the next free number from 0 for each node took minutes."""
    model = onnx.ModelProto()
    nodes = [helper.make_node("Relu", ["x"], ["y"]) for _ in range(20_000)]
    nodes[7].name = "Relu_3"
    model.graph.node.extend(nodes)
    started = time.perf_counter()
    name_nodes(model)
    assert time.perf_counter() - started < 5
    names = [node.name for node in model.graph.node]
    assert names[:5] == ["Relu_0", "Relu_1", "Relu_2", "Relu_4", "Relu_5"]
    assert len(set(names)) == len(names)


def evaluated_net(value):
    """A model that ONNX Runtime runs, of whose constant shape inference makes a formula."""
    model = models.parse(
        """(float[1, 4] x) => (float[1, 4] y) <int64[1] one = {1}> {
            product = local.Mul(value, one)
            unused = local.Floor(product)
            y = Erf(x)
        }
        <domain: "local", opset_import: ["": 17]> Mul (a, b) => (out) { out = Identity(a) }
        <domain: "local", opset_import: ["": 17]> Floor (a) => (out) { out = Identity(a) }"""
    )
    model.graph.initializer.append(value)
    onnx.checker.check_model(model)
    return model


@pytest.mark.attack
@pytest.mark.parametrize("library", ["onnxruntime", "onnxruntime-tools"])
def test_a_string_of_a_model_is_never_evaluated(tmp_path, library):
    if library == "onnxruntime-tools" and not WITH_TOOLS:
        pytest.skip("onnxruntime-tools is not installed")
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w') #%d"
    model = evaluated_net(helper.make_tensor("value", TensorProto.STRING, [1], [code.encode()]))
    source = write_model(model, tmp_path / "m.onnx")
    with pytest.raises(StageError):
        fuse(source, tmp_path / "out" / "m.onnx", "bert", library=library, disable=["attention"])
    assert not ran.exists()


@pytest.mark.attack
def test_a_pass_gets_no_more_memory_than_is_free(tmp_path, monkeypatch):
    limits = []

    def run_limited(*_, **limit):
        limits.append(limit)
        raise StageError("enough seen")

    monkeypatch.setattr(passes, "available_bytes", lambda: 123)
    monkeypatch.setattr(passes, "run_child", run_limited)
    fields = {"name": "m", "source": {"path": "m.onnx"}, "convert": {"precision": "auto", "timeout_s": 45}}
    plan = Plan(ModelSpec.model_validate(fields), ("cpu",))
    written = tmp_path / "out" / "m.onnx"
    request = PassRequest(name="fusion", source=tmp_path / "m.onnx", written=written)
    with pytest.raises(StageError, match="enough seen"):
        passes.run_pass(Context(plan, None, {}, tmp_path, say=lambda line: None), request)
    assert limits == [{"timeout_s": 45, "memory_bytes": 123}]
    assert not written.parent.exists()
