"""Laws of the files that a model may refer to: those that its variant lists, wherever it refers to them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from ortprep.bundle.loader_config import read_loader_config, write_loader_config
from ortprep.children.variant_check import check_variant
from ortprep.doctor.doctor_model import plan_of_bundle
from ortprep.errors import IntegrityError, LoadTimeoutError
from ortprep.export.options import MappedOptions
from ortprep.export.placement import try_model
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.runtime import load
from ortprep.runtime.loading import session as session_module
from ortprep.runtime.loading import variant_files
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


def bundle_that_refers_to(location: str, place: str, folder: Path) -> Path:
    """Writes a bundle whose records agree with its files, as a stranger would."""
    bundle = write_bundle(folder)
    (bundle / MODEL).write_bytes(refer_to(location, place))
    rewrite_digests(bundle)
    return bundle


def make_trial(request: tuple[Path, str]) -> object:
    bundle, name = request
    (variant,) = read_loader_config(bundle).variants
    assert variant.name == name
    options = MappedOptions({}, {}, variant.session_options, variant.providers)
    return try_model(bundle, variant, options, bundle / MODEL)


def make_doctor_plan(request: tuple[Path, str]) -> object:
    return plan_of_bundle(request[0], CPU_DEVICE)


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
        load(bundle, digests=digests)  # type: ignore[arg-type]


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


@pytest.mark.attack
def test_f25_an_address_in_memory_is_refused_even_where_a_file_of_its_name_is_listed(tmp_path):
    bundle = bundle_that_refers_to(TAG, "weights", tmp_path / "b")
    (bundle / "cpu" / TAG).parent.mkdir(parents=True)
    (bundle / "cpu" / DATA).rename(bundle / "cpu" / TAG)
    config = read_loader_config(bundle)
    (variant,) = config.variants
    files = (variant.files[0], entry(bundle, f"cpu/{TAG}"))
    write_loader_config(
        bundle, dataclasses.replace(config, variants=(dataclasses.replace(variant, files=files),))
    )
    rewrite_digests(bundle)
    with pytest.raises(IntegrityError, match="refers to data"):
        load(bundle)


@pytest.mark.attack
def test_f25_a_tag_that_protobuf_cuts_to_another_is_refused(tmp_path):
    bundle = write_bundle(tmp_path / "b")
    model = bundle / MODEL
    # external_data is field 13 of a tensor; 13 and 2**29 more are the same 32 bits.
    model.write_bytes(refer_to("unlisted.bin", "weights", tag_bits=1 << 32))
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


def test_what_no_parser_of_protobuf_takes_is_refused(tmp_path):
    bundle = write_bundle(tmp_path / "b")
    (bundle / MODEL).write_bytes(b"\x0b" + (bundle / MODEL).read_bytes())  # a group, which old parsers skip
    rewrite_digests(bundle)
    with pytest.raises(IntegrityError, match="not an ONNX model"):
        load(bundle)


def test_the_models_are_looked_at_once_for_any_number_of_loads(tmp_path, monkeypatch):
    looked = []
    check = variant_files.check_external_data

    def noted(*args: object) -> None:
        looked.append(args)
        check(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(variant_files, "check_external_data", noted)
    bundle = write_bundle(tmp_path / "b")
    time.sleep(0.05)
    for _ in range(3):
        (answer,) = load(bundle).run(None, {"x": sample()})
        np.testing.assert_allclose(answer, sample() @ weights_of(0), rtol=1e-5, atol=1e-6)
    assert len(looked) == 1
