"""ONNX files at the level of the wire, of any size a hostile one has."""

import json
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.codec import MAX_JSON_BYTES, MAX_JSON_VALUES, decode, parse_json
from ortprep.bundle.digest import digest_json
from ortprep.bundle.loader_config import MAX_LOADER_BYTES
from ortprep.bundle.manifest import MAX_MANIFEST_BYTES, Manifest
from ortprep.bundle.onnx_wire import SMALL_BYTES, WireError, encode_varint, external_locations, read_skeleton
from ortprep.errors import BundleError
from tests import builders as models
from tests.registry.builders import write_bundle

# -- a model's graph can be read without its weights, from any file, and nothing else is lost


def without_large_values(model):
    """Does with the onnx package what `read_skeleton` does without it, for raw data in the main graph."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if len(tensor.raw_data) > SMALL_BYTES:
            tensor.ClearField("raw_data")
    return copy


def test_a_skeleton_lacks_large_values_and_nothing_else(tmp_path):
    model = models.matmul_net(size=128, layers=3)
    skeleton = read_skeleton(models.write_model(model, tmp_path / "m.onnx"))
    assert onnx.ModelProto.FromString(skeleton) == without_large_values(model)
    assert len(skeleton) < SMALL_BYTES


@pytest.mark.attack
def test_texts_that_are_too_large_together_are_refused_before_all_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("ortprep.bundle.onnx_wire._MAX_SKELETON_BYTES", 2**20)
    graph = models.matmul_net(size=128, layers=3).graph.SerializeToString()
    text = b"\x32" + encode_varint(600_000) + bytes(600_000)  # a `doc_string`
    (tmp_path / "m.onnx").write_bytes((text + b"\x3a" + encode_varint(len(graph)) + graph) * 2)
    with pytest.raises(WireError, match="expected at most 1048576 bytes beside tensors"):
        read_skeleton(tmp_path / "m.onnx")


def test_large_values_in_subgraphs_and_attributes_are_left_out_too(tmp_path):
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


def test_values_in_typed_fields_are_left_out(tmp_path):
    model = models.conv_net()
    typed = onnx.helper.make_tensor("typed", onnx.TensorProto.FLOAT, [10_000], np.ones(10_000, np.float32))
    model.graph.initializer.append(typed)
    assert len(read_skeleton(models.write_model(model, tmp_path / "m.onnx"))) < SMALL_BYTES


@pytest.mark.attack
@given(cut=st.floats(0.001, 0.999))
def test_a_truncated_model_is_noticed(tmp_path_factory, cut):
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
def test_garbage_never_escapes_as_another_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("garbage") / "m.onnx"
    path.write_bytes(data)
    try:
        external_locations(b"\x3a" + encode_varint(len(data)) + data + b"location")
        assert len(read_skeleton(path)) <= len(data)
    except WireError:
        pass


@given(seed=st.integers(0, 2**32 - 1))
def test_numbers_hide_nothing_behind_them(tmp_path_factory, seed):
    """A tree ensemble is nodes with long lists of numbers, each a field of its own."""
    random = np.random.default_rng(seed)
    lists = {
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


def test_the_last_value_of_an_entry_counts_even_an_empty_one(tmp_path):
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
def test_small_fields_are_not_read_one_by_one(tmp_path, field):
    # Four MiB of them took 11.7 s, two reads for each.
    path = tmp_path / "m.onnx"
    reads = []
    path.write_bytes(field * 100_000)
    assert read_skeleton(path, between_reads=lambda: reads.append(1)) == path.read_bytes()
    assert len(reads) < 200


@pytest.mark.attack
def test_deep_nesting_is_refused_instead_of_exhausting_the_stack(tmp_path):
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
def test_a_million_small_fields_take_no_time(tmp_path, field):
    (tmp_path / "m.onnx").write_bytes(field * 1_000_000)
    begun_s = time.process_time()
    read_skeleton(tmp_path / "m.onnx")
    assert time.process_time() - begun_s < 2


@pytest.mark.attack
def test_a_field_of_terabytes_of_holes_is_refused_before_it_is_read(tmp_path):
    size = 8 * 2**40
    with (tmp_path / "m.onnx").open("wb") as file:
        file.write(encode_varint(99 << 3 | 2) + encode_varint(size))
        file.truncate(file.tell() + size)
    with pytest.raises(WireError, match="expected at most 536870912 bytes beside tensors"):
        read_skeleton(tmp_path / "m.onnx")


def test_external_locations_are_found_wherever_they_are(tmp_path):
    model = models.if_net()
    inner = model.graph.node[-1].attribute[0].g.initializer[0]
    models.point_outside(inner, "inner.bin", length=16)
    constant = models.tensor("constant", np.zeros(4, np.float32))
    models.point_outside(constant, "constant.bin", length=16)
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["unused"], value=constant))
    models.point_outside(model.graph.initializer[0], "inner.bin", length=4)
    skeleton = read_skeleton(models.write_model(model, tmp_path / "m.onnx"))
    assert sorted(external_locations(skeleton)) == ["constant.bin", "inner.bin"]
    assert external_locations(skeleton, in_subgraphs_only=True) == ("inner.bin",)
    assert external_locations(models.conv_net().SerializeToString()) == ()


@pytest.mark.attack
def test_a_look_at_locations_can_be_ended(tmp_path):
    model = models.conv_net()
    for number in range(1000):
        node = onnx.helper.make_node("Constant", [], [f"c{number}"], value_string="location")
        model.graph.node.append(node)
    reads = []

    def end():
        reads.append(None)
        if len(reads) > 100:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        external_locations(model.SerializeToString(), between_reads=end)


def test_what_a_subgraph_holds_at_any_depth_is_told_from_what_the_main_graph_holds(tmp_path):
    outer, inner = models.if_net(), models.if_net()
    branch, weight = outer.graph.node[-1].attribute[0].g, models.tensor("w", np.zeros(4, np.float32))
    models.point_outside(weight, "deep.bin", length=16)
    inner.graph.node.append(onnx.helper.make_node("Constant", [], ["unused"], value=weight))
    branch.node.append(onnx.helper.make_node("If", ["positive"], ["z"], then_branch=inner.graph))
    models.point_outside(outer.graph.initializer[0], "main.bin", length=4)
    skeleton = read_skeleton(models.write_model(outer, tmp_path / "m.onnx"))
    assert sorted(external_locations(skeleton)) == ["deep.bin", "main.bin"]
    assert external_locations(skeleton, in_subgraphs_only=True) == ("deep.bin",)
    assert external_locations(models.if_net().SerializeToString(), in_subgraphs_only=True) == ()


# -- what reading a stranger's manifest or loader.json costs in memory, measured in a fresh process

MOST_MB = {"manifest": 256, "loader_config": 64}
"""Above what the most expensive file takes; without limits, one of 16 MiB took 500 and more."""
READ = """\
import pathlib, re, sys
from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.errors import BundleError
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
before = peak()
try:
    {"manifest": read_manifest, "loader_config": read_loader_config}[sys.argv[1]](pathlib.Path(sys.argv[2]))
    print("read", (peak() - before) // 1024)
except BundleError as error:
    print("too" in str(error) and "refused", (peak() - before) // 1024)
"""
FILES = {
    "manifest": ("manifest.json", MAX_MANIFEST_BYTES),
    "loader_config": ("loader.json", MAX_LOADER_BYTES),
}


def nested(brackets):
    """Returns lists in lists: the most memory for a byte."""
    return ",".join(["[" * 60 + "]" * 60] * (brackets // 61))


def objects(values):
    """Returns objects with names of their own: the most memory for a value."""
    return ",".join(f'{{"{number:x}":0}}' for number in range(values // 3))


def wide(size):
    """Returns a string that takes four bytes for each of its characters once one needs them."""
    return f'"{"a" * size}\N{GRINNING FACE}"'


def write_hostile(folder, file, text):
    """Puts JSON into a field that readers do not know, with the digest of all; returns the file's size."""
    path = write_bundle(folder) / file
    data = {**json.loads(path.read_text()), "unknown": json.loads(f"[{text}]")}
    data.pop("self_digest")
    data["self_digest"] = digest_json(data)
    path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")))
    return path.stat().st_size


def read_in_child(what, folder):
    """Reads a file in a fresh process; returns what came of it, and the peak of its memory in MB."""
    ended = subprocess.run(
        [sys.executable, "-c", READ, what, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    outcome, peak_mb = ended.stdout.split()
    return outcome, int(peak_mb)


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("shape", [nested, objects])
@pytest.mark.attack
def test_f7_the_most_expensive_file_that_is_read_takes_bounded_memory(tmp_path, what, shape):
    file, most_bytes = FILES[what]
    values = min(MAX_JSON_VALUES - 5000, most_bytes // 4)
    text = shape(values)
    text += "," + wide(most_bytes - len(text) - 50_000) if len(text) < most_bytes - 60_000 else ""
    assert write_hostile(tmp_path / "bundle", file, text) <= most_bytes
    outcome, peak_mb = read_in_child(what, tmp_path / "bundle")
    assert outcome == "read"
    assert peak_mb < MOST_MB[what]


@pytest.mark.parametrize(
    "text",
    [nested(4 * MAX_JSON_VALUES), objects(2 * MAX_JSON_VALUES), wide(16 * 2**20)],
    ids=["nested", "objects", "wide"],
)
@pytest.mark.attack
def test_f7_a_file_past_the_limits_is_refused_before_it_is_parsed(tmp_path, text):
    path = write_bundle(tmp_path / "bundle") / "manifest.json"
    path.write_text(f'{path.read_text().rstrip().removesuffix("}")}, "unknown": [{text}]}}')
    outcome, peak_mb = read_in_child("manifest", tmp_path / "bundle")
    assert outcome == "refused"
    assert peak_mb < 2 * MAX_JSON_BYTES / 2**20 + 16


@pytest.mark.attack
def test_a_long_name_is_not_copied_for_each_of_its_values(tmp_path):
    """A name of 6 MB with 600,000 values took minutes; the message shows what each value costs."""
    data = json.loads((write_bundle(tmp_path / "bundle") / "manifest.json").read_text())
    record = {"runs_per_load": 1, "limits": {}, "knobs": {"k" * 6_000_000: ["", 0]}}
    data["variants"][0]["tuning"] = record
    with pytest.raises(BundleError, match=r"\[1\]") as caught:
        decode(Manifest, parse_json(json.dumps(data).encode(), name="manifest.json"))
    assert len(caught.value.message) < 1000
