from __future__ import annotations

from pathlib import Path

import pytest

from ortprep.diagnose.environment.facts.wheels import name_installed, read_requirements, read_wheels
from ortprep.versions import installed_onnxruntime


def plant_wheel(
    folder: Path, name: str, version: str, *owned: str, record: bool = True, requires: tuple[str, ...] = ()
) -> None:
    """Leaves in a folder what installing a wheel leaves for package managers to see."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {text}" for text in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if record:
        files = owned or ("onnxruntime/__init__.py",)
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files), encoding="utf-8")


def test_every_wheel_that_owns_the_package_is_found(tmp_path: Path) -> None:
    plant_wheel(tmp_path, "onnxruntime", "1.30.0")
    plant_wheel(tmp_path, "onnxruntime_gpu", "1.31.1")
    plant_wheel(tmp_path, "ort-nightly-gpu", "1.32.0.dev1")
    found = sorted((wheel.name, wheel.version) for wheel in read_wheels([str(tmp_path)]))
    assert found == [
        ("onnxruntime", "1.30.0"),
        ("onnxruntime-gpu", "1.31.1"),
        ("ort-nightly-gpu", "1.32.0.dev1"),
    ]


def test_wheels_that_own_other_packages_are_not_onnx_runtime(tmp_path: Path) -> None:
    plant_wheel(tmp_path, "onnxruntime-extensions", "0.14.0", "onnxruntime_extensions/__init__.py")
    plant_wheel(tmp_path, "onnxruntime-genai", "0.9.0", record=False)
    plant_wheel(tmp_path, "orthogonal", "1.0")
    assert read_wheels([str(tmp_path)]) == ()


def test_a_distribution_without_a_list_of_its_files_is_known_by_name(tmp_path: Path) -> None:
    plant_wheel(tmp_path, "onnxruntime", "1.31.1", record=False)
    assert [wheel.name for wheel in read_wheels([str(tmp_path)])] == ["onnxruntime"]


def test_a_folder_half_deleted_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime-1.31.1.dist-info").mkdir()
    assert read_wheels([str(tmp_path)]) == ()


def test_the_installed_wheel_is_found() -> None:
    assert [wheel.version for wheel in read_wheels()] == [installed_onnxruntime()]


def test_what_is_not_installed_requires_nothing() -> None:
    assert read_requirements("onnxruntime-of-the-moon") == ()


def test_the_wheel_that_is_imported_is_named_and_none_where_several_own_its_files(tmp_path: Path) -> None:
    assert name_installed(()) is None
    plant_wheel(tmp_path / "one", "onnxruntime", "1.30.0")
    plant_wheel(tmp_path / "two", "onnxruntime_gpu", "1.31.1")
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert name_installed(read_wheels(folders)) == "onnxruntime"
    assert name_installed(read_wheels(folders[::-1])) == "onnxruntime-gpu"
    plant_wheel(tmp_path / "one", "onnxruntime-gpu", "1.31.1")
    assert name_installed(read_wheels(folders)) is None


def test_a_finder_that_a_package_put_in_python_s_place_changes_nothing(tmp_path: Path) -> None:
    # MLflow's dependencies import the backport, which leaves out files that are not there.
    pytest.importorskip("importlib_metadata")
    plant_wheel(tmp_path, "onnxruntime", "1.30.0")
    (tmp_path / "half-1.0.dist-info").mkdir()
    assert [wheel.name for wheel in read_wheels([str(tmp_path)])] == ["onnxruntime"]
