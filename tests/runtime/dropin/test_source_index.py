"""Bundles are found by what they were prepared from."""

from __future__ import annotations

import pytest

from ortprep.runtime.dropin.source_index import is_source, list_bundles, name_place, split_places
from tests.runtime.dropin.builders import run_python, write_bundle_of, write_source

pytestmark = pytest.mark.runtime


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ("", []),
        ("/opt/bundles", ["/opt/bundles"]),
        ("/a:b:./c:", ["/a", "b", "./c"]),
        ("registry://net@v1", ["registry://net@v1"]),
        ("registry://net@v1:/a", ["registry://net@v1", "/a"]),
        ("/a:oci://host:5000/x/net@v1:~/b", ["/a", "oci://host:5000/x/net@v1", "~/b"]),
        ("s3://x/net@v1:file:///srv/net@v2:", ["s3://x/net@v1", "file:///srv/net@v2"]),
    ],
)
def test_places_are_folders_and_references(places, expected):
    assert split_places(places) == expected


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("/opt/bundles", "/opt/bundles"),
        ("registry://net@v1", "registry://net@v1"),
        ("https://user:secret@host/x/net@v1", "https://…/net@v1"),
        ("https://user:secret@host", "https://…"),
        ("s3://x/net@v1?sig=secret/key", "s3://…/net@v1"),
    ],
)
def test_a_place_is_logged_without_credentials(place, expected):
    assert name_place(place) == expected


def test_every_file_of_the_source_counts(tmp_path):
    model = write_source(tmp_path / "model/net.onnx")
    write_bundle_of(model, tmp_path / "bundles/net")
    (bundle,) = list_bundles(str(tmp_path / "bundles"))
    assert is_source(bundle, str(model))
    weights = model.with_name("net.onnx.data")
    content = weights.read_bytes()
    for other in (content[:-1], content[:-1] + b"\1"):
        weights.write_bytes(other)
        assert not is_source(bundle, str(model))
    weights.unlink()
    assert not is_source(bundle, str(model))


def test_what_one_process_read_no_other_reads_again(tmp_path, own_cache):
    bundles = tmp_path / "bundles"
    for name in ("one", "two\ttabs"):
        write_bundle_of(write_source(tmp_path / "net.onnx"), bundles / name)
    code = (
        "import sys; from ortprep.runtime.dropin.source_index import list_bundles\n"
        "print(len(list_bundles(sys.argv[1])), 'ortprep.bundle.loader_config' in sys.modules)"
    )

    def run() -> str:
        return run_python(code, bundles).stdout.strip()

    assert [run(), run()] == ["2 True", "2 True"]  # the second, since one name cannot be remembered
    (bundles / "two\ttabs").rename(bundles / "two")
    assert [run(), run()] == ["2 True", "2 False"]
    (index,) = (own_cache / "sources").rglob("*-*")
    index.write_bytes(b"one\tnonsense")
    assert run() == "2 True"


def test_what_is_no_bundle_is_passed_over(tmp_path, caplog):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/loader.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    assert list_bundles(str(tmp_path)) == []
    (message,) = caplog.messages
    assert message.startswith(f"cannot use {tmp_path}/damaged: ")
    assert "\n" not in message


def test_a_reference_that_cannot_be_pulled_is_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ORTPREP_REGISTRY", str(tmp_path / "registry"))
    for _ in range(2):
        assert list_bundles("registry://net@v1") == []
    (message,) = caplog.messages
    assert message.startswith("cannot use registry://net@v1: ")
    assert "\n" not in message


def test_a_damaged_bundle_is_read_once_until_it_is_written_again(tmp_path, own_cache, caplog):
    (tmp_path / "bundles/net").mkdir(parents=True)
    (tmp_path / "bundles/net/loader.json").write_text("{}")
    for _ in range(3):
        assert list_bundles(str(tmp_path / "bundles")) == []
    assert len(caplog.messages) == 1
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []
    write_bundle_of(write_source(tmp_path / "net.onnx"), tmp_path / "bundles/net")
    assert len(list_bundles(str(tmp_path / "bundles"))) == 1
