"""Laws of the files that a model may refer to: those that its variant lists, wherever it refers to them."""

import contextlib
import fcntl
import mmap
import os

import numpy as np
import pytest

from ortprep.bundle.loader_config import MAX_VARIANTS, read_loader_config, write_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.children.variant_check import check_variant
from ortprep.doctor.doctor_model import DoctorModel, plan_of
from ortprep.errors import BundleError, CacheError, IntegrityError, LoadError, LoadTimeoutError
from ortprep.export.options import MappedOptions
from ortprep.export.placement import try_model
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.runtime import load, wait_steady
from ortprep.runtime.loading import session as session_module
from tests.runtime.builders import entry, refer_to, rewrite_digests, sample, weights_of, write_bundle

pytestmark = pytest.mark.runtime

TAG = "*/_ORT_MEM_ADDR_/*"
LOCATIONS = (
    "/etc/passwd",
    "../../outside.bin",
    "../golden.npz",
    "unlisted.bin",
    "link.bin",
    "sub/../linear_optimized.onnx.data",
    "./linear_optimized.onnx.data",
    TAG,
    "",
    "a\\b",
)
PLACES = ("weights", "constant", "sparse", "subgraph", "function", "default")
MODEL, DATA = "cpu/linear_optimized.onnx", "linear_optimized.onnx.data"


def bundle_that_refers_to(location, place, folder):
    """Writes a bundle whose records agree with its files, as a stranger would."""
    bundle = write_bundle(folder)
    (bundle / MODEL).write_bytes(refer_to(location, place))
    rewrite_digests(bundle)
    return bundle


def make_trial(request):
    bundle, name = request
    (variant,) = read_loader_config(bundle).variants
    assert variant.name == name
    options = MappedOptions({}, (), variant.session_options, variant.providers)
    return try_model(bundle, variant, options, bundle / MODEL)


def make_doctor_plan(request):
    return plan_of(DoctorModel("net", "", request[0], is_bundle=True), CPU_DEVICE)


@pytest.mark.parametrize(
    ("location", "place", "digests"),
    [
        *((location, "weights", "changed") for location in LOCATIONS),
        *(("unlisted.bin", place, "changed") for place in PLACES[1:]),
        ("unlisted.bin", "weights", "full"),
        ("unlisted.bin", "weights", "off"),
    ],
)
@pytest.mark.attack
def test_f25_a_model_that_refers_to_what_is_not_listed_is_refused_before_onnxruntime_sees_it(
    tmp_path, monkeypatch, location, place, digests
):
    bundle = bundle_that_refers_to(location, place, tmp_path / "b")
    (tmp_path / "outside.bin").write_bytes(bytes(128))
    if digests != "full":  # which finds files that were added
        (bundle / "cpu/unlisted.bin").write_bytes(bytes(128))
        (bundle / "cpu/link.bin").symlink_to(tmp_path / "outside.bin")
    monkeypatch.setattr(session_module, "plain_session_class", lambda: None)
    with pytest.raises(IntegrityError, match="refers to data that its bundle does not list"):
        load(bundle, digests=digests)


@pytest.mark.parametrize("open_it", [check_variant, make_trial, make_doctor_plan])
@pytest.mark.attack
def test_f25_check_export_and_doctor_refuse_it_too(tmp_path, monkeypatch, open_it):
    bundle = bundle_that_refers_to("unlisted.bin", "constant", tmp_path / "b")
    (bundle / "cpu/unlisted.bin").write_bytes(bytes(128))
    monkeypatch.setattr(session_module, "plain_session_class", lambda: None)
    with pytest.raises(IntegrityError, match="refers to data that its bundle does not list"):
        open_it((bundle, "cpu"))


@pytest.mark.parametrize("place", PLACES)
def test_a_model_may_refer_to_what_is_listed(tmp_path, place):
    session = load(bundle_that_refers_to(DATA, place, tmp_path / "b"), digests="full")
    feeds = {"x": sample(), "yes": np.array(True)}
    (answer,) = session.run(None, {one.name: feeds[one.name] for one in session.get_inputs()})
    weights = weights_of(0) if place == "weights" else np.zeros((8, 4), np.float32)
    np.testing.assert_allclose(answer, sample() @ weights, rtol=1e-5, atol=1e-6)


def write_behind_an_address_in_memory(folder):
    bundle = bundle_that_refers_to(TAG, "weights", folder)
    (bundle / "cpu" / TAG).parent.mkdir(parents=True)
    (bundle / "cpu" / DATA).rename(bundle / "cpu" / TAG)
    return f"cpu/{TAG}"


def write_behind_a_link(folder):
    """It could be led elsewhere after the first load, and nothing that is watched would change."""
    bundle = bundle_that_refers_to("x/weights.bin", "weights", folder)
    (bundle / "cpu/y").mkdir()
    (bundle / "cpu/x").symlink_to("y")
    (bundle / "cpu" / DATA).rename(bundle / "cpu/y/weights.bin")
    return "cpu/y/weights.bin"


@pytest.mark.attack
@pytest.mark.parametrize("write", [write_behind_an_address_in_memory, write_behind_a_link])
def test_f25_a_location_is_refused_though_the_file_there_is_listed(tmp_path, write):
    listed, bundle = write(tmp_path / "b"), tmp_path / "b"
    config = read_loader_config(bundle)
    (variant,) = config.variants
    files = (variant.files[0], entry(bundle, listed))
    write_loader_config(bundle, config._replace(variants=(variant._replace(files=files),)))
    rewrite_digests(bundle)
    with pytest.raises(IntegrityError, match="refers to data"):
        load(bundle)


@pytest.mark.attack
def test_a_bundle_of_more_variants_than_a_build_makes_is_refused(tmp_path):
    bundle = write_bundle(tmp_path / "b")
    config = read_loader_config(bundle)
    many = tuple(config.variants[0]._replace(name=f"v{number}") for number in range(MAX_VARIANTS + 1))
    write_loader_config(bundle, config._replace(variants=many))
    with pytest.raises(BundleError, match="expected 1 to 256, got 257"):
        read_loader_config(bundle)


@pytest.mark.attack
@pytest.mark.parametrize(
    "model",
    [
        # external_data is field 13 of a tensor; 13 and 2**29 more are the same 32 bits.
        refer_to("unlisted.bin", "weights", tag_bits=1 << 32),
        b"\x0b" + refer_to(DATA, "weights"),  # a group, which old parsers skip
    ],
)
def test_f25_what_parsers_of_protobuf_read_differently_is_refused(tmp_path, model):
    bundle = write_bundle(tmp_path / "b")
    (bundle / MODEL).write_bytes(model)
    (bundle / "cpu/unlisted.bin").write_bytes(bytes(128))
    rewrite_digests(bundle)
    with pytest.raises(IntegrityError, match="not an ONNX model"):
        load(bundle)


@pytest.mark.attack
def test_f25_a_model_behind_a_link_is_looked_at_where_onnxruntime_looks(tmp_path):
    bundle = write_bundle(tmp_path / "b")
    (bundle / "other").mkdir()
    (bundle / MODEL).rename(bundle / "other/real.onnx")
    (bundle / MODEL).symlink_to("../other/real.onnx")
    (bundle / "other" / DATA).write_bytes(bytes(128))
    with pytest.raises(IntegrityError, match="refers to data"):
        load(bundle)


def test_a_deadline_ends_the_look_at_a_model(tmp_path):
    bundle = write_bundle(tmp_path / "b")
    (bundle / MODEL).write_bytes((bundle / MODEL).read_bytes() + b"\xf8\x3f\x00" * 7_000_000)  # 0.8 s
    rewrite_digests(bundle)
    with pytest.raises(LoadTimeoutError):
        load(bundle, timeout_s=0.1)


# -- laws of full digests: what is opened is what was hashed, whoever may write to the bundle

WEIGHTS = "cpu/linear_optimized.onnx.data"
MAPPED = SessionOptionsRecord("ORT_DISABLE_ALL", {}, {"session.disable_prepacking": "1"})
"""Weights are used where they are mapped."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bundle(tmp_path, cache):
    return write_bundle(
        tmp_path / "place" / "linear", options=MAPPED, first=SessionOptionsRecord("ORT_DISABLE_ALL")
    )


@contextlib.contextmanager
def mapped(path):
    """Maps a file as its writer does; yields what changes its weights and leaves no trace in its stamp."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:

        def change():
            status = path.stat()
            memory[:] = weights_of(9).tobytes()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

        yield change


def is_right(session):
    (answer,) = session.run(None, {"x": sample()})
    return np.allclose(answer, sample() @ weights_of(0), rtol=1e-4, atol=1e-5)


def let_others_write(bundle):
    (bundle / WEIGHTS).chmod(0o666)


def let_others_replace(bundle):
    (bundle / WEIGHTS).parent.chmod(0o707)


def let_others_replace_the_bundle(bundle):
    bundle.parent.chmod(0o777)


def nothing(bundle):
    """A process that has the file open, whatever its mode is now, is enough."""


@pytest.mark.attack
@pytest.mark.parametrize(
    "permit", [let_others_write, let_others_replace, let_others_replace_the_bundle, nothing]
)
def test_a_session_keeps_the_weights_that_were_hashed_whatever_a_writer_does_later(bundle, permit):
    permit(bundle)
    with mapped(bundle / WEIGHTS) as change:
        session = load(bundle, digests="full")
        assert is_right(session)
        change()
        assert is_right(session)
        with pytest.raises(IntegrityError, match="content"):
            load(bundle, digests="full")


@pytest.mark.attack
def test_weights_that_change_without_a_trace_never_get_into_the_second_phase(bundle):
    with mapped(bundle / WEIGHTS) as change:
        session = load(bundle, digests="full")
        assert is_right(session)
        change()
        with contextlib.suppress(IntegrityError, LoadError):
            wait_steady(session)
        assert is_right(session)


@pytest.mark.parametrize("check", ["none", "golden"])
def test_copies_are_gone_once_the_session_exists(bundle, cache, check):
    let_others_write(bundle)
    session = load(bundle, digests="full", check=check)
    assert is_right(session)
    wait_steady(session)
    assert list((cache / "copies").iterdir()) == []


def test_what_nobody_else_can_change_is_not_copied(bundle, cache):
    assert is_right(load(bundle, digests="full"))
    assert not cache.exists()


def test_without_a_cache_that_can_be_trusted_what_others_may_write_is_refused(bundle, cache):
    cache.mkdir()
    cache.chmod(0o777)
    assert is_right(load(bundle, digests="full"))
    let_others_write(bundle)
    with pytest.raises(CacheError, match="not safe to use"):
        load(bundle, digests="full")


def test_copies_that_a_killed_process_left_are_removed_and_those_in_use_stay(bundle, cache):
    let_others_write(bundle)
    for name in ("left", "used"):
        (cache / "copies" / name).mkdir(parents=True)
        (cache / "copies" / name / "weights").write_bytes(b"x")
        os.utime(cache / "copies" / name, (0, 0))
    handle = os.open(cache / "copies" / "used", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    load(bundle, digests="full")
    os.close(handle)
    assert [path.name for path in (cache / "copies").iterdir()] == ["used"]


@pytest.mark.attack
def test_onnxruntime_takes_no_options_from_a_bundles_model(tmp_path, monkeypatch):
    monkeypatch.setenv("ORT_LOAD_CONFIG_FROM_MODEL", "1")
    with pytest.raises(LoadError, match="ORT_LOAD_CONFIG_FROM_MODEL is set"):
        load(write_bundle(tmp_path / "b"))
