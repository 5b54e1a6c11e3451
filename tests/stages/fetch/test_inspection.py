"""What is said of a model is what is in it, and what is no model is told as such."""

import time
import tracemalloc
from inspect import signature

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortprep.bundle.loader_config import TensorSpec
from ortprep.children.child import run_child
from ortprep.errors import ChildError, ChildTimeoutError, SourceError
from ortprep.init.graph_facts import find_highest
from ortprep.stages.core.graph_walk import find_index_bounds
from ortprep.stages.fetch import inspection
from ortprep.stages.fetch.inspection import TIMEOUT_S, inspect_file, inspect_model
from tests import builders as models


def inspect(model, folder):
    """Inspects in this process, which has imported onnx anyway."""
    path = models.write_model(model, folder / "m.onnx")
    return inspect_model((str(path), "m"))


def test_facts_of_a_model(tmp_path):
    found = inspect(models.conv_net(channels=8, classes=10), tmp_path)
    assert found.interface.inputs == (TensorSpec("image", "float32", ("batch", 3, 16, 16)),)
    assert found.interface.outputs == (TensorSpec("scores", "float32", ("batch", 10)),)
    assert found.initializer_bytes == 4 * (8 * 3 * 3 * 3 + 8 + 8 * 10 + 10)
    assert found.operators["Conv"] == found.operators["Gemm"] == 1
    assert (found.opsets, found.ir_version) == ({"": models.OPSET}, models.IR_VERSION)
    assert not found.interface.external
    assert not found.external


@pytest.mark.parametrize(
    ("build", "dtypes"),
    [
        (models.half_net, ["float16"]),
        (models.bfloat16_net, ["bfloat16"]),
        (models.int8_net, ["float32"]),
        (models.string_input, ["string"]),
        (models.zero_inputs, []),
        (models.sequence_input, ["sequence(…)"]),
        (models.optional_input, ["optional(…)"]),
        (models.embedding, ["int64", "int64"]),
    ],
)
def test_inputs_of_every_kind_are_described(tmp_path, build, dtypes):
    assert [item.dtype for item in inspect(build(), tmp_path).interface.inputs] == dtypes


def test_operators_and_weights_of_subgraphs_and_functions_count_and_no_calls(tmp_path):
    loop = inspect(models.loop_net(), tmp_path)
    assert loop.operators == {"Add": 1, "Identity": 1, "Loop": 1, "MatMul": 1}
    assert loop.initializer_bytes == 4 * (16 + 4) + 8 + 1
    assert inspect(models.function_net(), tmp_path).operators == {"Add": 1, "Relu": 1}


def test_axes_the_model_says_nothing_of_are_none(tmp_path):
    model = models.conv_net(batch=None)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[1].dim_value = -1
    dims[2].dim_param = dims[3].dim_param = "?"  # Paddle's exporter, of sizes that differ
    found = inspect(model, tmp_path).interface
    assert found.inputs[0].shape == (None, None, None, None)
    assert found.outputs[0].shape is None


def test_an_input_with_an_initializer_is_no_input(tmp_path):
    model = models.conv_net()
    model.graph.input.append(models.value("fc_b", TensorProto.FLOAT, [10]))
    assert [item.name for item in inspect(model, tmp_path).interface.inputs] == ["image"]


def test_external_weights_count_without_being_there(tmp_path):
    model = models.matmul_net(size=64)
    path = models.write_external_model(model, tmp_path / "m.onnx", location="sub/w.bin")
    (tmp_path / "sub" / "w.bin").unlink()
    found = inspect_file(path, name="m")
    assert found.external == {"sub/w.bin": 2 * 64 * 64 * 4}
    assert found.initializer_bytes == 2 * 64 * 64 * 4
    assert found.interface.external


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize(
    "kind",
    [
        "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT4E2M1", "UINT4", "INT4",
        "UINT2", "INT2",
    ],
)  # fmt: skip
def test_an_input_or_output_of_a_type_that_no_array_has_is_refused_by_name(tmp_path, kind, side):
    model = models.conv_net()
    (value,) = getattr(model.graph, side)
    value.type.tensor_type.elem_type = TensorProto.DataType.Value(kind)
    with pytest.raises(SourceError, match=rf"got '{value.name}': {kind.lower()}\b"):
        inspect(model, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(range(256)), id="picture"),
        pytest.param(bytes(1000), id="zeros"),
        pytest.param(models.conv_net().SerializeToString()[:-40], id="truncated"),
        pytest.param(models.conv_net().graph.SerializeToString(), id="a graph alone"),
        pytest.param(b"\x08\x08", id="no graph"),
    ],
)
def test_what_is_no_model_is_told(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(SourceError, match="not an ONNX model, or an incomplete one: the model"):
        inspect_model((str(path), "the model"))


def test_a_malformed_external_reference_is_told(tmp_path):
    for entries in ({"location": ""}, {"location": "w", "offset": "-1"}, {"location": "w", "length": "x"}):
        model = models.conv_net()
        tensor = model.graph.initializer[0]
        models.point_outside(tensor, "w")
        del tensor.external_data[:]
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        with pytest.raises(SourceError, match=r"external tensor 'conv_w'"):
            inspect(model, tmp_path)


@pytest.mark.attack
def test_a_file_beyond_protobufs_limit_is_refused_unread(tmp_path):
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(SourceError, match="expected under 2 GiB"):
        inspect_model((str(path), "m"))


def test_weights_are_never_in_memory(tmp_path):
    sizes = {"small": 64, "large": 3072}
    peaks = {}
    for name, size in sizes.items():
        path = models.write_model(models.matmul_net(size=size), tmp_path / f"{name}.onnx")
        peaks[name] = run_child(inspect_model, (str(path), name)).peak_rss_bytes
    assert peaks["large"] - peaks["small"] < (tmp_path / "large.onnx").stat().st_size / 4


def gather_net(body):
    return models.parse(
        f"(int64[n] ids) => (float y) {{ {body} }}",
        table=np.zeros((7, 5), np.float32),
        small=np.zeros((3, 4), np.float32),
    ).graph


BOUNDS = {
    "y = Gather(table, ids)": 7,
    "y = Gather <axis = 1> (table, ids)": 5,
    "y = Gather <axis = -1> (table, ids)": 5,
    "y = GatherElements <axis = 1> (table, ids)": 5,
    "y = Gather(small, ids) z = Gather(table, ids)": 3,
    "a = Cast <to = 6> (ids) b = Unsqueeze(a, axes) c = Concat <axis = 0> (b, b) y = Gather(table, c)": 7,
    "copy = Identity(table) y = Gather(copy, ids)": 7,
    "held = Constant <value = float[3] {0, 0, 0}> () y = Gather(held, ids)": 3,
    "y = Gather(nowhere, ids)": None,
    "a = Add(ids, ids) y = Gather(table, a)": None,
    """y = If(yes) <
        then_branch = then () => (float z) { z = Gather(table, ids) },
        else_branch = else () => (float z) { z = Identity(yes) }
    >""": 7,
}


@pytest.mark.parametrize(("body", "bound"), BOUNDS.items())
def test_indices_are_bounded_by_what_they_index(body, bound):
    assert find_index_bounds(gather_net(body)) == ({} if bound is None else {"ids": bound})


@pytest.mark.parametrize("operator", ["Gather", "Identity", "Cast", "Constant"])
def test_a_node_that_lacks_its_inputs_is_left_for_onnxruntime_to_refuse(operator):
    for inputs, outputs in (([], ["y"]), (["table"], []), (["table"], ["y"])):
        graph = gather_net("")
        graph.node.append(helper.make_node(operator, inputs, outputs))
        assert find_index_bounds(graph) == {}


def peak_bytes(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.attack
def test_a_tensor_of_very_many_axes_is_refused_before_its_size_is_computed(tmp_path):
    """60,000 axes are 500 KB, and their product is a number of 450 KB that took half a minute."""
    tensor = TensorProto(name="w", dims=[2**62 - 1] * 60_000, data_type=TensorProto.FLOAT)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    answer = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [answer], [tensor])
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(SourceError, match="expected at most 64 axes, got 60000"):
        inspect_file(path, name="m")


@pytest.mark.attack
def test_many_inputs_passed_on_by_many_nodes_take_memory_once():
    count = 1500
    inputs = [helper.make_tensor_value_info(f"i{n}", TensorProto.INT64, [1]) for n in range(count)]
    joined = helper.make_node("Concat", [f"i{n}" for n in range(count)], ["c0"], axis=0)
    nodes = [helper.make_node("Identity", [f"c{n}"], [f"c{n + 1}"]) for n in range(count)]
    output = helper.make_tensor_value_info(f"c{count}", TensorProto.INT64, None)
    graph = helper.make_graph([joined, *nodes], "g", inputs, [output])
    assert peak_bytes(lambda: find_index_bounds(graph)) < 10 * 2**20


@pytest.mark.attack
def test_many_subgraphs_beside_many_tables_take_no_time_of_their_product():
    """Each subgraph was given a copy of all tables: a file of 890 KB took minutes."""
    count = 40_000
    choice = helper.make_node("If", ["i"], ["o"], then_branch=onnx.GraphProto(name="empty"))
    tables = [TensorProto(name=f"t{n}", dims=[1], data_type=TensorProto.FLOAT) for n in range(count)]
    graph = onnx.GraphProto(node=[choice] * count, initializer=tables)
    before = time.process_time()
    assert find_index_bounds(graph) == {}
    assert time.process_time() - before < 5.0  # 0.4 s, and 30 s with copies


@pytest.mark.attack
def test_the_reading_of_a_model_has_a_deadline(tmp_path):
    path = models.write_model(models.conv_net(), tmp_path / "m.onnx")
    assert signature(inspect_file).parameters["timeout_s"].default == TIMEOUT_S
    with pytest.raises(ChildTimeoutError):
        inspect_file(path, name="m", timeout_s=0.01)


@pytest.mark.attack
def test_a_small_model_that_takes_gigabytes_is_refused_where_memory_is_short(tmp_path, monkeypatch):
    """A file of 8 MB of empty nodes took 1.5 GB."""
    model = models.conv_net()
    model.graph.node.extend([onnx.NodeProto()] * 2_000_000)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    monkeypatch.setattr(inspection, "available_bytes", lambda: 150 * 2**20)
    # For want of memory protobuf says that it cannot parse, or crashes, in the child process.
    with pytest.raises((SourceError, ChildError), match=r"memory is short|SIG"):
        inspect_file(path, name="m")


@pytest.mark.attack
def test_an_input_that_grows_axes_without_end_is_followed_no_further():
    """A file of 22 KB took 5.4 GB: each node kept a tuple of all axes."""
    axes = numpy_helper.from_array(np.arange(2000, dtype=np.int64), "a")
    names = ["x", *(f"v{n}" for n in range(100))]
    nodes = [helper.make_node("Unsqueeze", [names[n], "a"], [names[n + 1]]) for n in range(100)]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    output = helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [value], [output], [axes])
    assert peak_bytes(lambda: find_highest(graph)) < 10 * 2**20
