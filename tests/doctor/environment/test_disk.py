from __future__ import annotations

from pathlib import Path

from ortprep.doctor.environment.facts.disk import measure_reading, read_disk_space

MEBIBYTE = 1024 * 1024


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


def test_a_folder_without_large_files_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    assert measure_reading(tmp_path) is None
    assert measure_reading(tmp_path / "not" / "made") is None


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


def test_a_folder_not_made_yet_is_on_the_disk_it_will_be_on(tmp_path: Path) -> None:
    assert read_disk_space(tmp_path / "not" / "made").total_bytes == read_disk_space(tmp_path).total_bytes
