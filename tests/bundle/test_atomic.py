"""Files that are written whole or not at all, and files that are in two places."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from ortprep.bundle import digest
from ortprep.bundle.atomic import new_folder, remove_stale_temporaries, write_bytes_atomic
from ortprep.bundle.digest import DigestCache, digest_bytes
from ortprep.bundle.file_links import copy_file, link_or_copy, share_model
from ortprep.runtime.loading.session import build_session, default_plan
from tests import builders as models

WRITER = """
import sys
from pathlib import Path
from ortprep.bundle.atomic import new_folder
destination = Path(sys.argv[1])
generation = 0
while True:
    generation += 1
    with new_folder(destination) as folder:
        for name in "abcdef":
            (folder / name).write_text(str(generation))
    print(generation, flush=True)
"""


def contents(folder):
    return {(folder / name).read_text() for name in "abcdef"}


@pytest.fixture
def destination(tmp_path):
    """A folder with one file."""
    path = tmp_path / "bundle"
    with new_folder(path) as folder:
        (folder / "a").write_text("old")
    return path


def is_untouched(destination):
    """Says whether the folder is as it was, with nothing beside it."""
    return (destination / "a").read_text() == "old" and list(destination.parent.iterdir()) == [destination]


@pytest.mark.parametrize("generations", [1, 2, 5])
def test_f16_a_writer_killed_at_any_instant_leaves_one_whole_generation(tmp_path, generations):
    destination = tmp_path / "bundle"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(destination)], stdout=subprocess.PIPE, env=dict(os.environ)
    )
    with writer:
        for _ in range(generations):
            writer.stdout.readline()
        time.sleep(0.001 * generations)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert len(contents(destination)) == 1
    remove_stale_temporaries(destination)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_f16_a_reader_never_sees_the_folder_absent_or_mixed_while_it_is_replaced(tmp_path):
    destination = tmp_path / "bundle"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(destination)], stdout=subprocess.PIPE)
    with writer:
        writer.stdout.readline()
        for _ in range(2000):
            handle = os.open(destination, os.O_RDONLY)
            os.close(handle)
        writer.kill()
    assert len(contents(destination)) == 1


def test_f17_who_reads_a_replaced_file_keeps_reading_what_it_was(destination):
    with (destination / "a").open() as reader:
        with new_folder(destination) as folder:
            (folder / "a").write_text("new")
        assert reader.read() == "old"
    assert (destination / "a").read_text() == "new"


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"), [(0o077, 0o600, 0o700), (0o022, 0o644, 0o755)]
)
def test_what_is_written_has_the_permissions_the_user_asks_for(tmp_path, umask, file_mode, folder_mode):
    before = os.umask(umask)
    try:
        write_bytes_atomic(tmp_path / "file", b"")
        with new_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "folder")]
    assert modes == [file_mode, folder_mode]


def test_an_error_while_writing_leaves_the_old_folder_and_no_trace(destination):
    with pytest.raises(RuntimeError), new_folder(destination) as folder:  # noqa: PT012
        (folder / "a").write_text("new")
        raise RuntimeError("disk full, say")
    assert is_untouched(destination)


@pytest.mark.parametrize("name", ["resnet-50", "resnet~2"])
def test_the_temporaries_of_a_model_with_a_longer_name_are_left_alone(tmp_path, name):
    with new_folder(tmp_path / name) as folder:
        (folder / "a").write_text("in progress")
        remove_stale_temporaries(tmp_path / "resnet")
        assert (folder / "a").exists()
    assert (tmp_path / name / "a").exists()


@pytest.mark.attack
def test_a_folder_that_another_process_takes_for_a_leftover_replaces_nothing(destination):
    """Where a lock does not reach another machine, its writer fails rather than to put less in place."""
    with pytest.raises(FileNotFoundError), new_folder(destination) as folder:  # noqa: PT012
        (folder / "a").write_text("new")
        remove_stale_temporaries(destination, min_age_s=3600)
        assert (folder / "a").exists()
        remove_stale_temporaries(destination)
    assert is_untouched(destination)


def test_an_error_while_writing_a_file_leaves_the_old_one_and_no_trace(tmp_path):
    path = tmp_path / "file"
    write_bytes_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_bytes_atomic(path, "not bytes")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


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
