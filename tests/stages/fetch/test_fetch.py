"""What fetch lets through is a whole model that ONNX Runtime takes; anything else is told clearly."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from ortprep.bundle.codec import decode
from ortprep.bundle.digest import digest_file
from ortprep.errors import SourceError, SpecError
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import Context, Plan
from ortprep.stages.core.graph_walk import external_extents
from ortprep.stages.core.results import FetchResult
from ortprep.stages.fetch import inspection
from ortprep.stages.fetch.sources import TIMEOUT_VARIABLE, LocalFile
from ortprep.stages.fetch.stage import FetchStage
from tests import builders as models
from tests.fakes import wait_for_a_tick
from tests.init.builders import map_classifier
from tests.registry.builders import read_tree
from tests.runtime.builders import refer_to
from tests.runtime.loading.test_external_data import PLACES
from tests.stages.fetch.fakes import run_here

STAGE = FetchStage()
IMAGE = {"image": {"shapes": [[1, 3, 16, 16]]}}


@pytest.fixture(autouse=True)
def _own_caches_and_no_children(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(inspection, "run_child", run_here)


def plan_of(folder, source, **fields):
    spec = ModelSpec.model_validate({"name": "m", "source": source, **fields})
    return Plan(spec.located_in(folder), ("cpu",))


def fetch(plan, folder, say=lambda line: None):
    folder.mkdir(exist_ok=True)
    context = Context(plan, None, {}, folder, say=say, key=key(plan))
    result = STAGE.run(context)
    return decode(FetchResult, result)


def key(plan):
    return STAGE.key(plan, None)


def test_a_local_model_is_copied_and_described(tmp_path):
    source = models.write_model(models.conv_net(), tmp_path / "models" / "a net.onnx")
    result = fetch(plan_of(tmp_path, {"path": "models/a net.onnx"}, inputs=IMAGE), tmp_path / "got")
    copy = tmp_path / "got" / result.model
    assert result.model == "a net.onnx"
    assert copy.read_bytes() == source.read_bytes()
    assert (result.source.kind, result.source.location) == ("path", "models/a net.onnx")
    assert result.source.sha256 == digest_file(source) == result.source.files[0].sha256
    assert [item.name for item in result.interface.inputs] == ["image"]


@pytest.mark.parametrize("location", ["w.bin", "sub/w.bin"])
def test_external_data_comes_along_in_the_same_layout(tmp_path, location):
    source = models.write_external_model(models.matmul_net(), tmp_path / "m.onnx", location=location)
    plan = plan_of(tmp_path, {"path": str(source)}, inputs={"x": {"shapes": [[1, 64]]}})
    result = fetch(plan, tmp_path / "got")
    files = {entry.path: entry.sha256 for entry in result.source.files}
    assert files == {"m.onnx": digest_file(source), location: digest_file(tmp_path / location)}
    assert (tmp_path / "got" / location).read_bytes() == (tmp_path / location).read_bytes()
    assert result.interface.external


@pytest.mark.parametrize("location", [None, "w.bin"], ids=["inline", "external"])
def test_without_its_zip_map_a_classifier_answers_with_the_values_of_the_maps(tmp_path, location):
    model = map_classifier()
    if location is not None:
        model.graph.initializer.append(models.tensor("zero", np.zeros((1, 4), np.float32)))
        model.graph.node.insert(0, onnx.helper.make_node("Add", ["x", "zero"], ["moved"]))
        model.graph.node[1].input[0] = "moved"
        path = models.write_external_model(model, tmp_path / "m.onnx", location=location)
    else:
        path = models.write_model(model, tmp_path / "m.onnx")
    result = fetch(plan_of(tmp_path, {"path": "m.onnx", "drop_zip_map": True}), tmp_path / "got")
    feed = {"x": np.array([[1.0, -2.0, 0.5, 3.0]], np.float32)}
    maps, matrix = (
        onnxruntime.InferenceSession(one).run(["probabilities"], feed)[0]
        for one in (path, tmp_path / "got" / result.model)
    )
    assert matrix.tolist() == [[maps[0]["no"], maps[0]["yes"]]]
    # The drop-in recognises a bundle by its files: it must not serve a matrix for this model's maps.
    assert result.source.sha256 == digest_file(path) != result.source.files[0].sha256
    assert result.source.files[0].sha256 == digest_file(tmp_path / "got" / result.model)


@pytest.mark.attack
def test_an_older_model_that_replaces_a_classifier_changes_the_key(tmp_path):
    path = models.write_model(map_classifier(), tmp_path / "m.onnx")
    plan = plan_of(tmp_path, {"path": "m.onnx", "drop_zip_map": True})
    before = key(plan)
    other = map_classifier()
    other.graph.node[0].name = "trained again"
    models.write_model(other, tmp_path / "other.onnx")
    os.utime(tmp_path / "other.onnx", (0, 0))
    (tmp_path / "other.onnx").replace(path)
    assert key(plan) != before


def refusal(tmp_path, **fields):
    source = fields.pop("source", {"path": "m.onnx"})
    with pytest.raises((SourceError, SpecError)) as caught:
        fetch(plan_of(tmp_path, source, **fields), tmp_path / "got")
    return str(caught.value)


@pytest.mark.attack
@pytest.mark.parametrize("start", [b"<token>", b'{"token": ', b"version https://git-lfs "])
def test_a_file_that_is_no_model_is_not_quoted(tmp_path, start):
    (tmp_path / "m.onnx").write_bytes(start + b"hunter2")
    assert "hunter2" not in refusal(tmp_path)


def test_a_missing_model_is_told_with_its_path(tmp_path):
    message = refusal(tmp_path)
    assert f"source model missing: {tmp_path / 'm.onnx'}\n  expected a file, got no such file" in message
    assert "hint: set source.path in the spec of m" in message
    with pytest.raises(SourceError, match="source model missing"):
        key(plan_of(tmp_path, {"path": "m.onnx"}))
    (tmp_path / "m.onnx").mkdir()
    with pytest.raises(SourceError, match="expected a file, got something else"):
        key(plan_of(tmp_path, {"path": "m.onnx"}))


def test_a_wrong_digest_is_told_and_a_right_one_passes(tmp_path):
    path = models.write_model(models.zero_inputs(), tmp_path / "m.onnx")
    right = digest_file(path)
    assert f"expected sha256:{'0' * 64}, got {right}" in refusal(
        tmp_path, source={"path": "m.onnx", "sha256": "0" * 64}
    )
    for spelling in (right, right.removeprefix("sha256:").upper()):
        folder = tmp_path / spelling[-6:]
        fetch(plan_of(tmp_path, {"path": "m.onnx", "sha256": spelling}), folder)


def test_a_spec_that_does_not_fit_is_told_before_weights_are_fetched(tmp_path):
    models.write_external_model(models.matmul_net(), tmp_path / "m.onnx")
    said = []
    with pytest.raises(SpecError, match=r"inputs\.x\.shapes: missing"):
        fetch(plan_of(tmp_path, {"path": "m.onnx"}), tmp_path / "got", said.append)
    assert said == [f"fetching {tmp_path / 'm.onnx'}"]


def external_model(tmp_path, location="w.bin"):
    """Writes a model, and its weights as `w.bin`, that claims that they are at `location`."""
    model = models.matmul_net()
    models.write_external_model(model, tmp_path / "m.onnx", location="w.bin")
    claimed = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for tensor in claimed.graph.initializer:
        tensor.external_data[0].value = location
    return models.write_model(claimed, tmp_path / "m.onnx")


@pytest.mark.parametrize("name", [".hidden.onnx", "net\u202exnno.onnx", "net.so", "a\\b.onnx"])
def test_a_model_whose_name_no_bundle_may_have_gets_a_plain_one(tmp_path, name):
    source = models.write_model(models.zero_inputs(), tmp_path / name)
    result = fetch(plan_of(tmp_path, {"path": name}), tmp_path / "got")
    assert result.model == "model.onnx"
    assert digest_file(tmp_path / "got" / result.model) == digest_file(source)


@pytest.mark.attack
@pytest.mark.parametrize(
    "location", ["w.so", ".w", ".d/w.bin", "sub/w.YAML", "d/" * 31 + "w", "./w", "d/./w", "d//w"]
)
def test_weights_with_a_name_that_no_bundle_may_have_are_refused_at_once(tmp_path, location):
    models.write_external_model(models.matmul_net(), tmp_path / "m.onnx", location=location)
    message = refusal(tmp_path, inputs=WANTED)
    assert f"external data has a name that no bundle may have: {location!r}" in message
    assert "hint: save the model again" in message


@pytest.mark.attack
def test_a_digest_of_the_model_alone_accepts_no_other_weights(tmp_path):
    digest = digest_file(external_model(tmp_path))
    weights = digest_file(tmp_path / "w.bin")
    source = {"path": "m.onnx", "sha256": digest}
    message = refusal(tmp_path, source=source, inputs=WANTED)
    assert f"expected a digest in source.data_sha256, got {weights}" in message
    source["data_sha256"] = {"w.bin": weights}
    fetch(plan_of(tmp_path, source, inputs=WANTED), tmp_path / "right")
    (tmp_path / "w.bin").write_bytes(bytes(32_768))
    assert f"expected {weights}, got " in refusal(tmp_path, source=source, inputs=WANTED)


@pytest.mark.attack
@pytest.mark.parametrize("replaced", ["m.onnx", "w.bin"])
@pytest.mark.parametrize("before", ["fetching /", "fetching w.bin"])
def test_a_bundle_never_mixes_the_files_of_two_exports(tmp_path, replaced, before):
    """An export that renames its new files into place changes no file that is open, and no inode's stamp."""
    for seed, folder in enumerate(("src", "new")):
        models.write_external_model(
            models.matmul_net(seed=seed), tmp_path / folder / "m.onnx", location="w.bin"
        )
    model = onnx.load(tmp_path / "new/m.onnx", load_external_data=False)
    model.producer_version = "2"
    models.write_model(model, tmp_path / "new/m.onnx")

    def replace(line):
        if line.startswith(before):
            (tmp_path / "new" / replaced).replace(tmp_path / "src" / replaced)

    plan, expected = plan_of(tmp_path, {"path": "src/m.onnx"}, inputs=WANTED), read_tree(tmp_path / "src")
    if (replaced, before) == ("m.onnx", "fetching w.bin"):  # it is copied by then
        fetch(plan, tmp_path / "got", replace)
        assert read_tree(tmp_path / "got") == expected
        return
    with pytest.raises(SourceError, match=f"changed while it was read: .*{replaced}") as caught:
        fetch(plan, tmp_path / "got", replace)
    assert caught.value.hint == "run the command again"


WANTED = {"x": {"shapes": [[1, 64]]}}


def test_missing_and_short_external_data_is_told(tmp_path):
    external_model(tmp_path)
    with (tmp_path / "w.bin").open("r+b") as file:
        file.truncate(32_767)
    short = "external data too short: 'w.bin' of .*\n  expected at least 32768 bytes, got 32767"
    assert re.search(short, refusal(tmp_path, inputs=WANTED))
    (tmp_path / "w.bin").unlink()
    assert "external data missing: 'w.bin'" in refusal(tmp_path, inputs=WANTED)


@pytest.mark.attack
def test_links_to_one_large_file_are_not_copied_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ortprep.stages.fetch.stage.MAX_INLINE_BYTES", 100_000)
    model = models.matmul_net()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(8192, np.float32), "other"))
    models.write_external_model(model, tmp_path / "m.onnx", location="w.bin")
    claimed = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for index, tensor in enumerate(claimed.graph.initializer):
        if tensor.external_data:
            tensor.external_data[0].value = f"w{index}.bin"
            (tmp_path / f"w{index}.bin").symlink_to("w.bin")
    models.write_model(claimed, tmp_path / "m.onnx")
    with (tmp_path / "w.bin").open("r+b") as file:
        file.truncate(100_000)  # each file is short enough, both together are not
    assert "one file under two names: 'w0.bin' and 'w1.bin'" in refusal(tmp_path, inputs=WANTED)
    for index in range(2):
        (tmp_path / f"w{index}.bin").unlink()
        shutil.copy(tmp_path / "w.bin", tmp_path / f"w{index}.bin")
    assert "too large" in refusal(tmp_path, inputs=WANTED)


@pytest.mark.attack
@pytest.mark.parametrize(
    "location", ["../w.bin", "/etc/hostname", "sub/../../w.bin", "..\\w.bin", ".", "w\x1b.bin"]
)
def test_external_data_outside_the_folder_is_refused(tmp_path, location):
    external_model(tmp_path, location)
    assert f"external data outside the model's folder: {location!r}" in refusal(tmp_path, inputs=WANTED)


@pytest.mark.attack
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["../w.bin", "/etc/hostname", "*/_ORT_MEM_ADDR_/*"])
def test_external_data_outside_the_folder_is_refused_wherever_a_model_refers_to_it(tmp_path, location, place):
    """ONNX Runtime before 1.24 would read the file, and one that may be an address is none of any version."""
    (tmp_path / "m.onnx").write_bytes(refer_to(location, place))
    assert f"external data outside the model's folder: {location!r}" in refusal(tmp_path)


@pytest.mark.parametrize("place", PLACES)
def test_external_data_comes_along_wherever_a_model_refers_to_it(tmp_path, place):
    (tmp_path / "m.onnx").write_bytes(refer_to("w.bin", place))
    (tmp_path / "w.bin").write_bytes(bytes(128))
    result = fetch(
        plan_of(tmp_path, {"path": "m.onnx"}, inputs={"x": {"shapes": [[1, 8]]}}), tmp_path / "got"
    )
    assert [(file.path, file.size_bytes) for file in result.source.files[1:]] == [("w.bin", 128)]
    assert external_extents(onnx.load(tmp_path / "got/m.onnx", load_external_data=False)) == {"w.bin": 128}


@pytest.mark.attack
def test_a_source_without_an_end_or_of_terabytes_is_refused_before_it_is_hashed(tmp_path, monkeypatch):
    """`/proc/self/pagemap` has 256 TiB, and a size of 0; a file of holes costs a clone nothing."""
    with pytest.raises(SourceError, match="cannot read /proc/self/maps\n  more bytes than its size says"):
        key(plan_of(tmp_path, {"path": "/proc/self/maps"}))
    with (tmp_path / "m.onnx").open("wb") as file:
        file.truncate(2**42)
    with pytest.raises(SourceError, match=r"model file too large: .*\n  expected under 2 GiB"):
        key(plan_of(tmp_path, {"path": "m.onnx"}))
    external_model(tmp_path)
    os.truncate(tmp_path / "w.bin", 2**42)
    plan = plan_of(tmp_path, {"path": "m.onnx"}, inputs=WANTED)
    assert key(plan)["source"]["external"] == {"w.bin": "too large"}
    os.truncate(tmp_path / "w.bin", 2**36)
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0")
    with pytest.raises(SourceError, match="took too long: "):
        key(plan)


@pytest.mark.attack
@pytest.mark.parametrize("name", ["m", "other"])
def test_external_data_with_the_name_of_a_model_that_a_stage_writes_is_refused(tmp_path, name):
    """A stage that wrote its model into a link to the weights would have changed the source."""
    external_model(tmp_path, f"{name}.onnx")
    (tmp_path / "w.bin").rename(tmp_path / "other.onnx")
    assert "external data has the name of the model" in refusal(tmp_path, inputs=WANTED, name=name)


@pytest.mark.attack
def test_external_data_symlinked_out_is_refused(tmp_path):
    folder = tmp_path / "inner"
    folder.mkdir()
    external_model(folder)
    (folder / "w.bin").rename(tmp_path / "outer.bin")
    (folder / "w.bin").symlink_to(tmp_path / "outer.bin")
    message = refusal(tmp_path, source={"path": "inner/m.onnx"}, inputs=WANTED)
    assert "external data outside the model's folder: 'w.bin'" in message
    assert "cp " not in message, "a command would copy whatever a stranger's link names"


def test_a_link_inside_the_folder_is_followed(tmp_path):
    external_model(tmp_path)
    (tmp_path / "w.bin").rename(tmp_path / "real.bin")
    (tmp_path / "w.bin").symlink_to("real.bin")
    fetch(plan_of(tmp_path, {"path": "m.onnx"}, inputs=WANTED), tmp_path / "got")
    assert not (tmp_path / "got" / "w.bin").is_symlink()


@pytest.mark.attack
def test_a_local_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(bytes(1000))

    def change(_):
        wait_for_a_tick(path)
        path.write_bytes(b"1" * 1000)

    with pytest.raises(SourceError, match="changed while it was read"):
        LocalFile(path).copy_to(tmp_path / "got", 1000, change)


def test_the_key_follows_every_byte_of_model_and_external_data(tmp_path):
    path = external_model(tmp_path)
    plan = plan_of(tmp_path, {"path": "m.onnx"}, inputs=WANTED)
    keys = [key(plan)]
    assert key(plan_of(tmp_path, {"path": "m.onnx"}, inputs={"x": {"shapes": [[2, 64]]}})) == keys[0]
    for file in (path, tmp_path / "w.bin"):
        file.write_bytes(file.read_bytes() + b"\x12\x00")
        keys.append(key(plan))
    (tmp_path / "w.bin").unlink()
    keys.append(key(plan))
    assert len({str(item) for item in keys}) == 4


def test_the_key_is_the_same_from_wherever_the_build_is_started(tmp_path, monkeypatch):
    models.write_model(models.conv_net(), tmp_path / "m.onnx")
    np.savez(tmp_path / "0.npz", image=np.zeros((1, 3, 16, 16), np.float32))
    monkeypatch.chdir(tmp_path)
    here, there = (key(plan_of(folder, {"path": "m.onnx"}, samples="*.npz")) for folder in (Path(), tmp_path))
    assert here == there


def test_a_model_is_not_downloaded_again_for_what_the_spec_says_of_inputs(tmp_path):
    source = {"url": f"hf://o/r@{'0' * 40}/m.onnx"}
    assert key(plan_of(tmp_path, source, inputs=IMAGE)) == key(plan_of(tmp_path, source))


def test_the_key_is_told_without_importing_onnx_or_numpy(tmp_path):
    external_model(tmp_path)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ortprep.spec.models import ModelSpec\n"
        "from ortprep.stages.core.contract import Plan\n"
        "from ortprep.stages.fetch.stage import FetchStage\n"
        "spec = ModelSpec.model_validate({'name': 'm', 'source': {'path': 'm.onnx'}})\n"
        "FetchStage().key(Plan(spec.located_in(Path(sys.argv[1])), ('cpu',)), None)\n"
        "print(sorted({'onnx', 'onnxruntime', 'numpy', 'fsspec', 'google'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout == "[]\n"
