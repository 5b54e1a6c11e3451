from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortprep.errors import StageError
from ortprep.stages.convert.weights import EXTERNAL_BYTES, read_graph, read_pieces, write_tensor
from ortprep.stages.core.graph_walk import name_nodes, walk_initializers
from tests.builders import build_model, if_net, matmul_net, tensor, write_external_model, write_model


def values_of(model: onnx.ModelProto, folder: Path) -> dict[str, bytes]:
    return {each.name: b"".join(read_pieces(each, folder)) for each in walk_initializers(model)}


def expected_values(model: onnx.ModelProto) -> dict[str, bytes]:
    return {each.name: numpy_helper.to_array(each).tobytes() for each in walk_initializers(model)}


@pytest.mark.parametrize("model", [matmul_net(size=128), if_net(size=8192)], ids=["main graph", "branches"])
def test_values_are_read_wherever_they_lie(model, tmp_path):
    expected = expected_values(model)

    inline = write_model(model, tmp_path / "inline" / "m.onnx")
    external = write_external_model(model, tmp_path / "external" / "m.onnx", location="data/w.bin")

    assert values_of(read_graph(inline), inline.parent) == expected
    assert values_of(read_graph(external), external.parent) == expected


def test_large_values_inside_a_model_are_not_read_with_its_graph(tmp_path):
    path = write_model(matmul_net(size=256), tmp_path / "m.onnx")

    graph = read_graph(path)

    assert len(graph.SerializeToString()) < 2_000 < path.stat().st_size


@pytest.mark.parametrize(
    "kind", [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT64]
)
def test_values_in_typed_fields_are_read_as_raw_ones(kind, tmp_path):
    numbers = np.arange(5000) % 100
    typed = helper.make_tensor("w", kind, [5000], numbers.tolist())
    assert not typed.raw_data
    path = write_model(build_model([], inputs=[], outputs=[], initializers=[typed]), tmp_path / "m.onnx")

    expected = numbers.astype(helper.tensor_dtype_to_np_dtype(kind)).tobytes()
    assert values_of(read_graph(path), tmp_path) == {"w": expected}


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


def test_a_truncated_model_is_refused(tmp_path):
    path = write_model(matmul_net(), tmp_path / "m.onnx")
    os.truncate(path, path.stat().st_size - 10)

    with pytest.raises(StageError, match="not an ONNX model"):
        read_graph(path)


def test_what_is_written_is_read_back_aligned_and_small_tensors_stay_inside(tmp_path):
    sizes = {"small": EXTERNAL_BYTES // 4 - 1, "odd": EXTERNAL_BYTES // 4 + 1, "next": 1000, "page": 4096}
    tensors = [tensor(name, np.arange(size, dtype=np.float32)) for name, size in sizes.items()]
    model = build_model([], inputs=[], outputs=[], initializers=tensors)
    for each in model.graph.initializer:
        write_tensor(each, [numpy_helper.to_array(each).tobytes()], tmp_path / "m.onnx")

    offsets = {
        each.name: int({entry.key: entry.value for entry in each.external_data}["offset"])
        for each in model.graph.initializer
        if each.data_location == TensorProto.EXTERNAL
    }
    assert list(offsets) == ["odd", "next", "page"]
    assert [offset % 64 for offset in offsets.values()] == [0, 0, 0]
    assert offsets["page"] % 4096 == 0
    assert values_of(model, tmp_path) == {
        each.name: numpy_helper.to_array(each).tobytes() for each in tensors
    }


def test_a_model_of_small_tensors_leaves_no_data_file(tmp_path):
    write_tensor(tensor("w", np.float32(1)), [bytes(4)], tmp_path / "m.onnx")

    assert list(tmp_path.iterdir()) == []


def test_bytes_that_do_not_make_the_tensor_are_refused(tmp_path):
    with pytest.raises(StageError, match=r"'w'\n  expected 4000 bytes, got 3999"):
        write_tensor(tensor("w", np.zeros(1000, np.float32)), [bytes(3999)], tmp_path / "m.onnx")


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
