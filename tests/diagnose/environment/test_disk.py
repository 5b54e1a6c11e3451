from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortprep.diagnose.environment.facts.disk import measure_reading, read_disk_space

MEBIBYTE = 1024 * 1024


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


def test_a_folder_without_large_files_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    reading = measure_reading(tmp_path)
    assert reading is not None
    assert reading.warm_bytes_per_s > 0
    assert _names(tmp_path) == {"small"}


def test_the_largest_file_is_read_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/model.onnx.data").write_bytes(bytes(17 * MEBIBYTE))
    (tmp_path / "bundle/other").write_bytes(bytes(MEBIBYTE))
    before = (tmp_path / "bundle/model.onnx.data").stat()
    reading = measure_reading(tmp_path)
    assert reading is not None
    assert 0 < reading.size_bytes <= 17 * MEBIBYTE
    after = (tmp_path / "bundle/model.onnx.data").stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def test_a_folder_not_made_yet_is_measured_and_not_made(tmp_path: Path) -> None:
    assert measure_reading(tmp_path / "not" / "made") is not None
    assert _names(tmp_path) == set()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory here")
def test_a_file_system_that_lives_in_memory_has_no_disk_speed() -> None:
    reading = measure_reading(Path("/dev/shm"))
    assert reading is not None
    assert reading.cold_bytes_per_s is None


def test_a_folder_not_made_yet_is_on_the_disk_it_will_be_on(tmp_path: Path) -> None:
    assert read_disk_space(tmp_path / "not" / "made").total_bytes == read_disk_space(tmp_path).total_bytes


def test_where_nothing_can_be_written_nothing_is_measured() -> None:
    assert measure_reading(Path("/proc/self")) is None
