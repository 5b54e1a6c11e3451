import json
import logging
import os
import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.digest import BLOCK_BYTES
from ortprep.bundle.loader_config import FileEntry, read_loader_config, write_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.bundle.verification import check_bundle
from ortprep.errors import BundleError, IntegrityError, LoadError, LoadTimeoutError, PipelineError
from ortprep.runtime import load
from ortprep.runtime.loading import load_options, opened_bundle, session
from ortprep.runtime.loading.bundle_loader import open_bundle
from ortprep.runtime.loading.variant_files import _LARGE_BYTES
from ortprep.runtime.tensors.arrays import read_tensors, write_tensors
from tests.runtime.builders import (
    CPU_ONLY,
    UNMET,
    assert_answers,
    rewrite_digests,
    sample,
    weights_of,
    write_bundle,
    write_chain,
    write_linear,
)

pytestmark = pytest.mark.runtime

DATA = "cpu/linear_optimized.onnx.data"
POLICIES = ("changed", "full", "off")


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "linear")


def flip_byte(path, position=5):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def edit_config(folder, change):
    """Changes loader.json and gives it a digest that fits, so that only its meaning can give it away."""
    from ortprep.bundle.digest import digest_json

    path = folder / LOADER_FILE
    data = json.loads(path.read_bytes())
    change(data)
    rest = {key: value for key, value in data.items() if key != "self_digest"}
    path.write_text(json.dumps(rest | {"self_digest": digest_json(rest)}))


@pytest.mark.parametrize("digests", POLICIES)
@pytest.mark.parametrize("check", ["none", "golden"])
def test_a_whole_bundle_loads_and_answers(bundle, digests, check):
    session = load(bundle, digests=digests, check=check)
    assert_answers(session)


def test_a_bundle_loads_by_a_relative_path_and_through_a_link(bundle, tmp_path, monkeypatch):
    (tmp_path / "current").symlink_to(bundle)
    monkeypatch.chdir(tmp_path)
    for path in ("linear", "current"):
        assert load(path, digests="full").get_inputs()[0].name == "x"


@pytest.mark.parametrize("dtype", ["float8e4m3fn", "float4e2m1", "int4", "uint2"])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_an_input_or_output_of_a_type_that_no_array_has_is_refused_by_name(bundle, side, dtype):
    edit_config(bundle, lambda data: data[side][0].update(dtype=dtype))
    with pytest.raises(BundleError, match=f"got '[xy]': {dtype}"):
        load(bundle)


@pytest.mark.parametrize("digests", ["changed", "full"])
@pytest.mark.parametrize("file", [DATA, "cpu/linear_optimized.onnx"])
@pytest.mark.attack
def test_one_changed_byte_is_reported_by_the_first_load_and_by_later_ones(bundle, file, digests):
    for _ in range(2):
        flip_byte(bundle / file)
        with pytest.raises(IntegrityError, match=f"{file}.*content") as caught:
            load(bundle, digests=digests)
        assert caught.value.hint == f"ortprep check {bundle}"
        flip_byte(bundle / file)
        load(bundle, digests=digests)


@pytest.mark.parametrize("in_environment", [False, True])
def test_without_digests_nothing_is_hashed(bundle, monkeypatch, in_environment):
    flip_byte(bundle / DATA)
    if in_environment:
        monkeypatch.setenv("ORTPREP_DIGESTS", "off")
    (answer,) = load(bundle, **({} if in_environment else {"digests": "off"})).run(None, {"x": sample()})
    assert not np.allclose(answer, sample() @ weights_of(0), rtol=0, atol=0)
    with pytest.raises(IntegrityError):
        load(bundle, digests="full")


def test_a_policy_of_the_environment_that_nobody_knows_is_refused(bundle, monkeypatch):
    monkeypatch.setenv("ORTPREP_DIGESTS", "none")
    with pytest.raises(LoadError, match="digests='none'\n  expected one of changed, full, off"):
        load(bundle)


@pytest.mark.attack
def test_an_added_file_is_reported_by_the_full_policy(bundle):
    (bundle / "cpu" / "extra.bin").write_bytes(b"x")
    load(bundle)
    with pytest.raises(IntegrityError, match=r"cpu/extra\.bin: added"):
        load(bundle, digests="full")


def test_the_full_policy_also_hashes_variants_that_are_not_loaded(tmp_path):
    folder = write_bundle(tmp_path / "b", requirements={"cpu": CPU_ONLY, "portable": CPU_ONLY})
    flip_byte(folder / "portable/linear_optimized.onnx.data")
    load(folder)
    with pytest.raises(IntegrityError, match="portable"):
        load(folder, digests="full")


@pytest.mark.attack
def test_the_full_policy_trusts_no_remembered_digest(bundle):
    stat = (bundle / DATA).stat()
    load(bundle)
    flip_byte(bundle / DATA)
    os.utime(bundle / DATA, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(IntegrityError):
        load(bundle, digests="full")


@pytest.mark.parametrize("digests", POLICIES)
@pytest.mark.parametrize("name", ["loader.json", "cpu/linear_optimized.onnx", DATA, "golden.npz"])
@pytest.mark.attack
def test_f7_a_pipe_in_a_files_place_is_an_error_and_never_waited_for(bundle, name, digests):
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    with pytest.raises(BundleError, match=r"regular file"):
        load(bundle, digests=digests, check="golden")


@pytest.mark.parametrize("digests", ["changed", "off"])
@pytest.mark.attack
def test_f17_a_file_exchanged_while_it_is_loaded_is_reported(bundle, digests, monkeypatch):
    build = session.build_session

    def build_late(*args, **kwargs):
        other = bundle.with_name("other.data")
        other.write_bytes(weights_of(9).tobytes())
        other.replace(bundle / DATA)
        return build(*args, **kwargs)

    monkeypatch.setattr(opened_bundle, "build_session", build_late)
    with pytest.raises(IntegrityError, match=r"changed while .*\n.*got different linear_optimized\.onnx"):
        load(bundle, digests=digests)


@pytest.mark.parametrize("digests", ["changed", "full"])
def test_a_deadline_ends_the_hashing(bundle, digests, monkeypatch):
    class Clock:
        """Lets a second pass at every look at it."""

        now = 0.0

        def monotonic(self):
            self.now += 1
            return self.now

    monkeypatch.setattr(load_options, "time", Clock())
    (bundle / LOADER_FILE).touch()
    with pytest.raises(LoadTimeoutError, match=r"within 1\.5 s"):
        load(bundle, digests=digests, timeout_s=1.5)


def test_what_is_no_bundle_is_a_bundle_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for name in ("nothing", "a"):
        with pytest.raises(BundleError, match=r"no bundle there: .*\n  expected a folder with loader"):
            load(tmp_path / name)


@pytest.mark.parametrize("path", ["../secret.onnx", "/etc/passwd", "cpu/../../secret.onnx", "cpu\\x", ""])
@pytest.mark.attack
def test_a_path_that_escapes_is_refused(bundle, path):
    def escape(data):
        data["variants"][0]["model"] = path
        data["variants"][0]["files"][0]["path"] = path

    edit_config(bundle, escape)
    with pytest.raises(IntegrityError, match="leaves its bundle"):
        load(bundle, digests="off")


@pytest.mark.parametrize("digests", POLICIES)
@pytest.mark.attack
def test_a_link_that_leads_out_is_refused(bundle, tmp_path, digests):
    outside = tmp_path / "outside.data"
    (bundle / DATA).rename(outside)
    (bundle / DATA).symlink_to(outside)
    with pytest.raises(IntegrityError, match="leaves its bundle"):
        load(bundle, digests=digests)


@pytest.mark.parametrize(
    ("attributes", "entries", "said"),
    [
        ({"optimized_model_filepath": "written"}, {}, "'optimized_model_filepath' must not be set"),
        ({"execution_mode": "ORT_SIDEWAYS"}, {}, "'execution_mode' has a bad value: expected"),
        (
            {},
            {"session.optimized_model_filepath": "written"},
            "'session.optimized_model_filepath' must not be set",
        ),
        ({}, {"session.from_the_future": "1"}, "is unknown to every ONNX Runtime up to .* upgrade ortprep"),
    ],
)
@pytest.mark.attack
def test_f18_what_no_bundle_may_set_is_refused_before_anything_is_built(
    tmp_path, monkeypatch, attributes, entries, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(onnxruntime, "__version__", "1.99.0")
    options = SessionOptionsRecord("ORT_DISABLE_ALL", attributes, entries)
    with pytest.raises(IntegrityError, match=said):
        load(write_bundle(tmp_path / "b", options=options))
    assert not Path("written").exists()


def test_f13_every_variant_passed_over_is_listed_with_its_reasons(tmp_path):
    mainframe = CPU_ONLY._replace(machine="s390x", cpu_features=("vx",))
    folder = write_bundle(tmp_path / "b", requirements={"cpu": UNMET, "portable": mainframe})
    with pytest.raises(LoadError) as caught:
        load(folder)
    assert caught.value.hint == "ortprep prepare linear --target cpu"
    message = str(caught.value)
    assert "cpu: expected ONNX Runtime >= 99.0" in message
    assert "portable: expected a s390x processor" in message
    assert "expected a processor with vx" in message


def test_f13_falling_back_is_said_aloud_and_taking_the_first_is_no_warning(tmp_path, caplog):
    folder = write_bundle(tmp_path / "b", requirements={"cpu": UNMET, "portable": CPU_ONLY})
    flip_byte(folder / DATA)  # of the variant that does not fit: no obstacle
    with caplog.at_level(logging.INFO, logger="ortprep"):
        opened = open_bundle(folder)
    assert opened.variant.name == "portable"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "taking variant portable; passed over: cpu: expected ONNX Runtime >= 99.0" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ortprep"):
        load(write_bundle(tmp_path / "first"))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("INFO", "linear: taking variant cpu")]


def test_a_fitting_variant_that_cannot_be_loaded_is_an_error_not_a_fallback(tmp_path):
    folder = write_bundle(tmp_path / "b", requirements={"cpu": CPU_ONLY, "portable": CPU_ONLY})
    (folder / "cpu/linear_optimized.onnx").write_bytes(b"not a model")
    rewrite_digests(folder)
    with pytest.raises(LoadError, match="ONNX Runtime cannot load"):
        load(folder)


def make_large(bundle, added_bytes=_LARGE_BYTES):
    """Has the weights of a bundle grow to a size that is hashed in a thread; returns their file."""
    (weights,) = bundle.glob("*/*.data")
    with weights.open("ab") as file:
        file.write(bytes(added_bytes))
    rewrite_digests(bundle)
    return weights


def test_no_session_of_a_large_file_is_given_out_before_its_digest_is_right(bundle):
    weights = make_large(bundle)
    load(bundle)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(IntegrityError, match="content: expected"):
        load(bundle)
    data[-1] ^= 1
    weights.write_bytes(data)
    load(bundle)


@pytest.mark.attack
@pytest.mark.parametrize("digests", ["changed", "full"])
@pytest.mark.parametrize("field", ["blocks", "sha256"])
def test_f4_a_file_of_several_blocks_is_compared_by_them(bundle, digests, field):
    weights = make_large(bundle, 2 * BLOCK_BYTES)
    before = weights.read_bytes()
    load(bundle, digests=digests)
    flip_byte(weights, BLOCK_BYTES + 1)
    with pytest.raises(IntegrityError, match="content: expected"):
        load(bundle, digests=digests)
    # Whoever hashes a file in another way can still be told only of one of the two digests.
    weights.write_bytes(before)
    edit_config(bundle, lambda data: data["variants"][0]["files"][1].update({field: f"sha256:{'0' * 64}"}))
    with pytest.raises(IntegrityError):
        load(bundle, digests="full") if field == "blocks" else check_bundle(bundle)


def test_an_interrupt_is_not_kept_waiting_by_the_hashing(bundle, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    flip_byte(make_large(bundle, 2 * BLOCK_BYTES))
    monkeypatch.setattr(opened_bundle, "build_session", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(bundle)


@pytest.mark.attack
def test_a_compressed_golden_sample_is_refused(bundle):
    golden = bundle / "golden.npz"
    np.savez_compressed(golden, **read_tensors(golden))
    rewrite_digests(bundle)
    with pytest.raises(BundleError, match="compressed arrays in"):
        load(bundle, check="golden")


def alter_golden(folder):
    tensors = read_tensors(folder / "golden.npz")
    tensors["output:y"][1, 2] += 1
    write_tensors(folder / "golden.npz", tensors)


@pytest.mark.attack
def test_a_golden_sample_altered_with_its_digests_fails_the_golden_check(bundle):
    alter_golden(bundle)
    rewrite_digests(bundle)
    load(bundle, digests="full")
    with pytest.raises(LoadError, match=r"does not answer as recorded\n  y: .* at \[1, 2\]"):
        load(bundle, check="golden")


def record_part(bundle, step, *, values, layout):
    tensors = read_tensors(bundle / "golden.npz")
    part, form = values.reshape(-1)[::step], np.array(layout, np.int64)
    write_tensors(bundle / "golden.npz", {"input:x": tensors["input:x"], "part:y": part, "layout:y": form})
    rewrite_digests(bundle)


@pytest.mark.attack
@pytest.mark.parametrize("shape", [[2**62] * 33, [0, *[2**62] * 5]])
def test_a_golden_part_of_a_shape_that_cannot_be_is_refused_before_it_is_multiplied(bundle, shape):
    record_part(bundle, 1, values=np.zeros(0, np.float32), layout=[1, *shape])
    with pytest.raises(BundleError, match="bad golden sample"):
        load(bundle, check="golden")


@pytest.mark.parametrize(("step", "index"), [(1, (1, 3)), (3, (1, 2)), (7, (1, 3))])
def test_a_part_of_an_output_is_checked_at_its_positions(bundle, step, index):
    answer = read_tensors(bundle / "golden.npz")["output:y"]
    record_part(bundle, step, values=answer, layout=[step, *answer.shape])
    load(bundle, check="golden")
    answer[index] += 1
    record_part(bundle, step, values=answer, layout=[step, *answer.shape])
    place = re.escape(str(list(index)))
    with pytest.raises(LoadError, match=rf"does not answer as recorded\n  y: .* at {place}"):
        load(bundle, check="golden")


@pytest.mark.parametrize("layout", [[], [0, 2, 4], [-1, 2, 4], [3, 2, 5], [3, -2, -4], [3, 2**62, 2**62]])
def test_a_part_that_its_layout_contradicts_is_refused(bundle, layout):
    answer = read_tensors(bundle / "golden.npz")["output:y"]
    record_part(bundle, 3, values=answer, layout=layout)
    with pytest.raises(BundleError, match="bad golden sample: output 'y'"):
        load(bundle, check="golden")


@pytest.mark.attack
def test_weights_altered_with_their_digests_fail_the_golden_check(bundle):
    write_linear(bundle / "cpu/linear_optimized.onnx", weights_of(1))
    rewrite_digests(bundle)
    with pytest.raises(LoadError, match="does not answer as recorded"):
        load(bundle, check="golden")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"input:other": sample(), "output:y": sample()}, "cannot run its golden sample"),
        ({"input:x": sample()}, "holds no output"),
        ({"input:x": sample(), "output:y": sample()[:, :2]}, r"y: shape: expected \[2, 2\], got \[2, 4\]\n"),
    ],
)
def test_a_golden_sample_that_does_not_fit_fails_the_golden_check(bundle, tensors, said):
    write_tensors(bundle / "golden.npz", tensors)
    with pytest.raises(IntegrityError, match=r"golden\.npz"):
        load(bundle, check="golden")
    rewrite_digests(bundle)
    with pytest.raises(LoadError, match=said):
        load(bundle, check="golden")


def test_a_deadline_that_passes_while_the_session_is_made_stops_it(tmp_path):
    folder = write_bundle(tmp_path / "b")
    write_chain(folder / "cpu/linear_optimized.onnx", 30_000)
    rewrite_digests(folder)
    load(folder)
    with pytest.raises(LoadTimeoutError, match=r"within \d\S* s"):
        load(folder, timeout_s=0.1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"device_id": "0"},
        {"device_id": 0.0},
        {"device_id": True},
        {"timeout_s": "3"},
        {"timeout_s": False},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"precision": "int9"},
        {"phases": "later"},
        {"digests": ["full"]},
        {"digests": "some"},
        {"check": "all"},
    ],
)
def test_an_argument_of_a_wrong_type_or_name_is_an_error_with_a_hint(bundle, arguments, capfd):
    with pytest.raises(LoadError, match="bad argument of load") as caught:
        load(bundle, **arguments)
    assert f"load(…, {next(iter(arguments))}=" in str(caught.value.hint)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("path", [b"artifacts/net", 3, None, "a\0b", Path("a\0b")])
def test_what_names_no_path_is_an_error_with_a_hint(path):
    with pytest.raises(LoadError, match="not a bundle path") as caught:
        load(path)
    assert "artifacts/NAME" in str(caught.value.hint)


def replace_while_loading(monkeypatch, bundle, seeds):
    """Has another build take the bundle's place whenever a session is about to be made, once per seed."""
    build = session.build_session

    def build_late(*args, **kwargs):
        if seeds:
            write_bundle(bundle, seed=seeds.pop(0))
        return build(*args, **kwargs)

    monkeypatch.setattr(opened_bundle, "build_session", build_late)


def test_a_bundle_replaced_while_loading_is_loaded_anew(bundle, monkeypatch):
    replace_while_loading(monkeypatch, bundle, [7])
    assert_answers(load(bundle), 7)


def test_a_bundle_replaced_again_and_again_is_an_error(bundle, monkeypatch):
    replace_while_loading(monkeypatch, bundle, [7, 8])
    with pytest.raises(LoadError, match="replaced twice"):
        load(bundle)


@pytest.mark.attack
def test_an_extra_file_in_loader_config_alone_is_a_contradiction(bundle):
    config = read_loader_config(bundle)
    stray = FileEntry("cpu/stray.bin", 1, "sha256:" + "0" * 64)
    variant = config.variants[0]._replace(files=(*config.variants[0].files, stray))
    write_loader_config(bundle, config._replace(variants=(variant,)))
    with pytest.raises(PipelineError):
        load(bundle, digests="full")
