"""A model's graph can be read without its weights, from any file, and nothing else is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.onnx_wire import (
    SMALL_BYTES,
    WireError,
    encode_varint,
    external_locations,
    read_skeleton,
    subgraph_locations,
    walk_fields,
)
from tests import builders as models


def without_large_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Does with the onnx package what `read_skeleton` does without it, for raw data in the main graph."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if len(tensor.raw_data) > SMALL_BYTES:
            tensor.ClearField("raw_data")
    return copy


@pytest.mark.parametrize("build", [models.conv_net, models.if_net, models.loop_net, models.function_net])
def test_a_small_model_is_its_own_skeleton(tmp_path: Path, build: object) -> None:
    path = models.write_model(build(), tmp_path / "m.onnx")  # type: ignore[operator]
    assert read_skeleton(path) == path.read_bytes()


def test_a_skeleton_lacks_large_values_and_nothing_else(tmp_path: Path) -> None:
    model = models.matmul_net(size=128, layers=3)
    skeleton = read_skeleton(models.write_model(model, tmp_path / "m.onnx"))
    assert onnx.ModelProto.FromString(skeleton) == without_large_values(model)
    assert len(skeleton) < SMALL_BYTES


def test_large_values_in_subgraphs_and_attributes_are_left_out_too(tmp_path: Path) -> None:
    model = models.if_net()
    large = models.tensor("large", np.zeros(100_000, np.float32))
    model.graph.node[-1].attribute[0].g.initializer.append(large)
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["unused"], value=large))
    skeleton = read_skeleton(models.write_model(model, tmp_path / "m.onnx"))
    assert len(skeleton) < SMALL_BYTES
    parsed = onnx.ModelProto.FromString(skeleton)
    assert [list(a.t.dims) for node in parsed.graph.node for a in node.attribute if a.HasField("t")] == [
        [100_000]
    ]


def test_values_in_typed_fields_are_left_out(tmp_path: Path) -> None:
    model = models.conv_net()
    typed = onnx.helper.make_tensor("typed", onnx.TensorProto.FLOAT, [10_000], np.ones(10_000, np.float32))
    model.graph.initializer.append(typed)
    assert len(read_skeleton(models.write_model(model, tmp_path / "m.onnx"))) < SMALL_BYTES


@pytest.mark.attack
@given(cut=st.floats(0.001, 0.999))
def test_a_truncated_model_is_noticed(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    data = models.matmul_net(size=128).SerializeToString()
    path = tmp_path_factory.mktemp("cut") / "m.onnx"
    path.write_bytes(data[: int(len(data) * cut)])
    try:
        parsed = onnx.ModelProto.FromString(read_skeleton(path))
    except WireError:
        return
    # The one way to cut unseen is between the fields of the model, before its graph.
    assert not parsed.HasField("graph")


@pytest.mark.attack
@given(data=st.binary(max_size=200))
def test_garbage_never_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("garbage") / "m.onnx"
    path.write_bytes(data)
    try:
        external_locations(b"\x3a" + encode_varint(len(data)) + data + b"location")
        assert len(read_skeleton(path)) <= len(data)
    except WireError:
        pass


FIELDS = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(0, 2**64 - 1)),
    st.tuples(st.integers(1, 40), st.binary(max_size=30)),
    st.tuples(st.integers(1, 2**29 - 1), st.just(b"")),
)


@given(fields=st.lists(FIELDS), repeats=st.integers(1, 300))
def test_fields_are_the_ones_that_were_written_however_many(
    fields: list[tuple[int, int | bytes]], repeats: int
) -> None:
    encoded = b"".join(
        encode_varint(number << 3) + encode_varint(value)
        if isinstance(value, int)
        else encode_varint(number << 3 | 2) + encode_varint(len(value)) + value
        for number, value in fields
    )
    assert list(walk_fields(encoded * repeats)) == fields * repeats


@given(seed=st.integers(0, 2**32 - 1))
def test_numbers_hide_nothing_behind_them(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """A tree ensemble is nodes with long lists of numbers, each a field of its own."""
    random = np.random.default_rng(seed)
    lists: dict[str, Any] = {
        "ints": random.integers(-(2**63), 2**63 - 1, 3000) >> random.integers(0, 63, 3000),
        "floats": random.standard_normal(3000),
        "strings": ["x" * size for size in random.integers(0, 40, 3000)],
    }
    constant = models.tensor("constant", np.zeros(4, np.float32))
    models.point_outside(constant, "behind.bin", length=16)
    model = models.conv_net()
    attributes = {name: list(lists[name]) for name in random.permutation(list(lists))}
    model.graph.node.append(onnx.helper.make_node("Trees", [], ["unused"], **attributes, value=constant))
    skeleton = read_skeleton(models.write_model(model, tmp_path_factory.mktemp("trees") / "m.onnx"))
    assert skeleton == model.SerializeToString()
    assert external_locations(skeleton) == ("behind.bin",)


def test_the_last_value_of_an_entry_counts_even_an_empty_one(tmp_path: Path) -> None:
    model = models.conv_net()
    models.point_outside(model.graph.initializer[0], "a.bin", length=16)
    location = model.graph.initializer[0].external_data[0].SerializeToString()
    data = model.SerializeToString().replace(location, location[:-6] + b"\x03aaa\x12\0")
    (entry,) = [
        e for e in onnx.ModelProto.FromString(data).graph.initializer[0].external_data if e.key == "location"
    ]
    assert external_locations(data) == (entry.value,) == ("",)


@pytest.mark.attack
@pytest.mark.parametrize("field", [b"\x1a\0", b"\x08\1", b"\x1a\1a", b"\xfa\1\0"], ids=bytes.hex)
def test_small_fields_are_not_read_one_by_one(tmp_path: Path, field: bytes) -> None:
    # Four MiB of them took 11.7 s, two reads for each.
    path = tmp_path / "m.onnx"
    reads: list[int] = []
    path.write_bytes(field * 100_000)
    assert read_skeleton(path, between_reads=lambda: reads.append(1)) == path.read_bytes()
    assert len(reads) < 200


@pytest.mark.attack
def test_deep_nesting_is_refused_instead_of_exhausting_the_stack(tmp_path: Path) -> None:
    graph = bytes(SMALL_BYTES + 1)
    for _ in range(60):
        # A graph in an attribute of a node of a graph: fields 6, 5 and 1.
        for number in (6, 5, 1):
            graph = encode_varint(number << 3 | 2) + encode_varint(len(graph)) + graph
    path = tmp_path / "m.onnx"
    path.write_bytes(encode_varint(7 << 3 | 2) + encode_varint(len(graph)) + graph)
    with pytest.raises(WireError, match="nested deeper"):
        read_skeleton(path)


@pytest.mark.attack
@pytest.mark.parametrize("field", [b"\x08\x01", b"\x80\x01\x01", b"\xa2\x01\x00"])
def test_a_million_small_fields_take_no_time(tmp_path: Path, field: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(field * 1_000_000)
    begun_s = time.process_time()
    read_skeleton(tmp_path / "m.onnx")
    assert time.process_time() - begun_s < 2


def test_external_locations_are_found_wherever_they_are(tmp_path: Path) -> None:
    model = models.if_net()
    inner = model.graph.node[-1].attribute[0].g.initializer[0]
    models.point_outside(inner, "inner.bin", length=16)
    constant = models.tensor("constant", np.zeros(4, np.float32))
    models.point_outside(constant, "constant.bin", length=16)
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["unused"], value=constant))
    models.point_outside(model.graph.initializer[0], "inner.bin", length=4)
    skeleton = read_skeleton(models.write_model(model, tmp_path / "m.onnx"))
    assert sorted(external_locations(skeleton)) == ["constant.bin", "inner.bin"]
    assert subgraph_locations(skeleton) == ("inner.bin",)
    assert external_locations(models.conv_net().SerializeToString()) == ()


def test_what_a_subgraph_holds_at_any_depth_is_told_from_what_the_main_graph_holds(tmp_path: Path) -> None:
    outer, inner = models.if_net(), models.if_net()
    branch, weight = outer.graph.node[-1].attribute[0].g, models.tensor("w", np.zeros(4, np.float32))
    models.point_outside(weight, "deep.bin", length=16)
    inner.graph.node.append(onnx.helper.make_node("Constant", [], ["unused"], value=weight))
    branch.node.append(onnx.helper.make_node("If", ["positive"], ["z"], then_branch=inner.graph))
    models.point_outside(outer.graph.initializer[0], "main.bin", length=4)
    skeleton = read_skeleton(models.write_model(outer, tmp_path / "m.onnx"))
    assert sorted(external_locations(skeleton)) == ["deep.bin", "main.bin"]
    assert subgraph_locations(skeleton) == ("deep.bin",)
    assert subgraph_locations(models.if_net().SerializeToString()) == ()
