"""A file in two places is one on disk where it can be, and what is known of it stays known."""

import os

import pytest

from ortprep.bundle import digest
from ortprep.bundle.digest import DigestCache, digest_bytes
from ortprep.bundle.file_links import copy_file, link_or_copy, share_model
from ortprep.runtime.loading.session import build_session, default_plan
from tests import builders as models

CONTENT = b"weights" * 1000


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    DigestCache().record(path, digest_bytes(CONTENT))
    return path


def test_a_linked_file_takes_no_room_and_is_not_hashed_again(source, monkeypatch):
    def refuse(path):
        raise AssertionError(f"hashed again: {path}")

    monkeypatch.setattr(digest, "digest_file", refuse)
    destination = source.parent / "deep" / "er" / "destination"
    link_or_copy(source, destination)
    assert destination.samefile(source)
    assert DigestCache().digest(source) == DigestCache().digest(destination) == digest_bytes(CONTENT)


def test_where_there_are_no_links_the_bytes_are_copied(source, monkeypatch):
    def refuse(source, destination):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    destination = source.parent / "destination"
    link_or_copy(source, destination)
    assert not destination.samefile(source)
    assert destination.read_bytes() == CONTENT


def test_a_file_that_is_there_is_never_written_over(source):
    destination = source.parent / "destination"
    for place in (link_or_copy, copy_file):
        destination.write_bytes(b"other")
        with pytest.raises(FileExistsError):
            place(source, destination)
        assert destination.read_bytes() == b"other"


def test_a_copy_is_a_file_of_its_own(source):
    destination = source.parent / "deep" / "destination"
    copy_file(source, destination)
    assert destination.read_bytes() == CONTENT
    assert destination.stat().st_nlink == source.stat().st_nlink == 1


def test_weights_of_the_main_graph_are_shared(tmp_path):
    model = models.write_external_model(models.matmul_net(), tmp_path / "a" / "m.onnx", location="parts/w")
    share_model(model, tmp_path / "b" / "renamed.onnx")
    assert (tmp_path / "b" / "renamed.onnx").samefile(model)
    assert (tmp_path / "b" / "parts" / "w").samefile(tmp_path / "a" / "parts" / "w")


@pytest.mark.parametrize("location", ["w.bin", "./parts/w.bin"])
def test_onnx_runtime_loads_a_shared_model_from_either_place(tmp_path, location):
    """Weights of branches are refused if they have two hard links; the model file is shared all the same."""
    model = models.write_external_model(
        models.if_net(size=4096), tmp_path / "a" / "m.onnx", location=location
    )
    share_model(model, tmp_path / "b" / "m.onnx")
    assert (tmp_path / "b" / "m.onnx").samefile(model)
    for place in ("a", "b"):
        build_session(default_plan(str(tmp_path / place / "m.onnx")))


def test_a_file_in_another_format_is_shared(tmp_path):
    model = tmp_path / "a" / "m.ort"
    model.parent.mkdir()
    model.write_bytes(b"\x18\x00\x00\x00ORTM")
    share_model(model, tmp_path / "b" / "m.ort")
    assert (tmp_path / "b" / "m.ort").samefile(model)
