from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ortprep.doctor.environment.facts.wheels import read_wheels
from ortprep.versions import installed_onnxruntime


def plant_wheel(folder: Path, name: str, version: str, *owned: str, record: bool = True) -> None:
    """Leaves in a folder what installing a wheel leaves for package managers to see."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if record:
        files = owned or ("onnxruntime/__init__.py",)
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files), encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that Python imports from."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_every_wheel_that_owns_the_package_is_found(site: Path) -> None:
    plant_wheel(site, "onnxruntime", "1.30.0")
    plant_wheel(site, "onnxruntime_gpu", "1.31.1")
    plant_wheel(site, "ort-nightly-gpu", "1.32.0.dev1")
    found = sorted((wheel.name, wheel.version) for wheel in read_wheels())
    assert found == [
        ("onnxruntime", "1.30.0"),
        ("onnxruntime-gpu", "1.31.1"),
        ("ort-nightly-gpu", "1.32.0.dev1"),
    ]


def test_wheels_that_own_other_packages_are_not_onnx_runtime(site: Path) -> None:
    plant_wheel(site, "onnxruntime-extensions", "0.14.0", "onnxruntime_extensions/__init__.py")
    plant_wheel(site, "onnxruntime-genai", "0.9.0", record=False)
    plant_wheel(site, "orthogonal", "1.0")
    assert read_wheels() == ()


def test_a_distribution_without_a_list_of_its_files_is_known_by_name(site: Path) -> None:
    plant_wheel(site, "onnxruntime", "1.31.1", record=False)
    assert [wheel.name for wheel in read_wheels()] == ["onnxruntime"]


def test_a_folder_half_deleted_is_passed_over(site: Path) -> None:
    (site / "onnxruntime-1.31.1.dist-info").mkdir()
    assert read_wheels() == ()


def test_the_installed_wheel_is_found() -> None:
    assert [wheel.version for wheel in read_wheels()] == [installed_onnxruntime()]


def test_a_wheel_that_another_folder_hides_is_none(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_wheel(site / "one", "onnxruntime", "1.30.0")
    plant_wheel(site / "two", "onnxruntime-gpu", "1.31.1")
    monkeypatch.setattr(sys, "path", [str(site / "two"), str(site / "one")])
    assert [wheel.name for wheel in read_wheels()] == ["onnxruntime-gpu"]


def test_a_finder_that_a_package_put_in_python_s_place_changes_nothing(site: Path) -> None:
    # MLflow's dependencies import the backport, which leaves out files that are not there.
    pytest.importorskip("importlib_metadata")
    plant_wheel(site, "onnxruntime", "1.30.0")
    (site / "half-1.0.dist-info").mkdir()
    assert [wheel.name for wheel in read_wheels()] == ["onnxruntime"]
