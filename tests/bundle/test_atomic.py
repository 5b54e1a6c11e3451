"""Atomic or absent: F16 of docs/format.md, with processes that are really killed."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from ortprep.bundle.atomic import new_folder, remove_stale_temporaries, write_bytes_atomic

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


@pytest.mark.parametrize("generations", [1, 2, 5])
def test_f16_a_writer_killed_at_any_instant_leaves_one_whole_generation(tmp_path, generations):
    destination = tmp_path / "bundle"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(destination)], stdout=subprocess.PIPE, env=dict(os.environ)
    )
    assert writer.stdout is not None
    with writer:
        for _ in range(generations):
            writer.stdout.readline()
        time.sleep(0.001 * generations)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert len(contents(destination)) == 1
    remove_stale_temporaries(tmp_path, "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_f16_a_reader_never_sees_the_folder_absent_or_mixed_while_it_is_replaced(tmp_path):
    destination = tmp_path / "bundle"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(destination)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    with writer:
        writer.stdout.readline()
        for _ in range(2000):
            handle = os.open(destination, os.O_RDONLY)
            os.close(handle)
        writer.kill()
    assert len(contents(destination)) == 1


def test_f17_who_reads_a_replaced_file_keeps_reading_what_it_was(tmp_path):
    destination = tmp_path / "bundle"
    with new_folder(destination) as folder:
        (folder / "a").write_text("old")
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


def test_an_error_while_writing_leaves_the_old_folder_and_no_trace(tmp_path):
    destination = tmp_path / "bundle"
    with new_folder(destination) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(RuntimeError), new_folder(destination) as folder:  # noqa: PT012
        (folder / "a").write_text("new")
        raise RuntimeError("disk full, say")
    assert (destination / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_the_temporaries_of_a_model_with_a_longer_name_are_left_alone(tmp_path):
    with new_folder(tmp_path / "resnet-50") as folder:
        (folder / "a").write_text("in progress")
        remove_stale_temporaries(tmp_path, "resnet")
        assert (folder / "a").exists()
    assert (tmp_path / "resnet-50" / "a").exists()


def test_an_error_while_writing_a_file_leaves_the_old_one_and_no_trace(tmp_path):
    path = tmp_path / "file"
    write_bytes_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_bytes_atomic(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
