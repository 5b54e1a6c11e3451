"""ONNX Runtime in children: the installed one, and planted ones that are broken, old or without CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ortprep.doctor.environment.check import diagnose_environment
from ortprep.doctor.environment.facts.runtime import parse_reason, read_runtime, try_providers
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.versions import installed_onnxruntime
from tests.doctor.environment.builders import build_linked_elf, codes, one
from tests.doctor.environment.test_wheels import plant_wheel

REPOSITORY = str(Path(__file__).parents[3])

PLANTED = """\
__version__ = "{version}"
package_name = "{package}"
cuda_version = ""
def get_build_info(): return "planted"
def get_available_providers(): return {providers!r}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which this process and its children import first."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def _plant_package(site: Path, text: str) -> None:
    package = site / "onnxruntime"
    package.mkdir()
    (package / "__init__.py").write_text(text, encoding="utf-8")


def test_the_installed_version_and_its_providers_are_read() -> None:
    runtime, libraries = read_runtime()
    assert runtime.version == installed_onnxruntime()
    assert CPU in runtime.available
    assert (CUDA in runtime.available) == bool(libraries)


def test_a_provider_is_usable_only_if_a_session_ran() -> None:
    (provider,) = try_providers([CPU])
    assert provider.usable


def test_a_provider_nobody_knows_is_unusable_and_says_why() -> None:
    (provider,) = try_providers(["MoonExecutionProvider"])
    assert not provider.usable
    assert provider.reason


def test_both_wheels_installed_at_once_are_found(site: Path, tmp_path: Path) -> None:
    plant_wheel(site, "onnxruntime", "1.30.0")
    plant_wheel(site, "onnxruntime-gpu", "1.31.1")
    diagnosis = diagnose_environment(artifacts=tmp_path)
    assert one(diagnosis.findings, "both-wheels-installed").severity == "problem"


def test_what_a_removed_wheel_left_behind_is_a_broken_import(site: Path, tmp_path: Path) -> None:
    plant_wheel(site, "onnxruntime", "1.31.1")
    _plant_package(site, "")
    found = one(diagnose_environment(artifacts=tmp_path).findings, "onnxruntime-broken")
    assert "get_build_info" in found.text or "__version__" in found.text


def test_a_process_that_dies_of_the_import_is_a_broken_import(site: Path) -> None:
    _plant_package(site, "import os; os.abort()\n")
    runtime, libraries = read_runtime()
    assert runtime.error is not None
    assert "SIGABRT" in runtime.error
    assert libraries == ()


def test_no_onnxruntime_at_all_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        sys, "path", [REPOSITORY, *(entry for entry in sys.path if "site-packages" not in entry)]
    )
    diagnosis = diagnose_environment(artifacts=tmp_path)
    assert one(diagnosis.findings, "no-onnxruntime").hint in (
        "pip install onnxruntime",
        "pip install onnxruntime-gpu",
    )


def test_an_old_version_and_a_wheel_of_another_are_found(site: Path, tmp_path: Path) -> None:
    plant_wheel(site, "onnxruntime", "1.31.1")
    _plant_package(site, PLANTED.format(version="1.16.3", package="onnxruntime", providers=[CPU]))
    found = codes(diagnose_environment(artifacts=tmp_path).findings)
    assert {"onnxruntime-too-old", "onnxruntime-version-differs"} <= found


def test_a_wheel_without_cuda_that_is_asked_for_it_is_found(site: Path, tmp_path: Path) -> None:
    _plant_package(site, PLANTED.format(version="1.31.1", package="onnxruntime", providers=[CPU]))
    diagnosis = diagnose_environment(artifacts=tmp_path, expect=["cuda"])
    assert one(diagnosis.findings, "provider-not-in-wheel").severity == "problem"


def test_a_library_that_a_provider_links_to_and_nobody_has_is_found(site: Path, tmp_path: Path) -> None:
    providers = [CUDA, CPU]
    _plant_package(site, PLANTED.format(version="1.31.1", package="onnxruntime-gpu", providers=providers))
    (site / "onnxruntime/capi").mkdir()
    planted = build_linked_elf("libc.so.6", "libcublas.so.99", "libcudnn.so.98")
    (site / "onnxruntime/capi/libonnxruntime_providers_cuda.so").write_bytes(planted)
    diagnosis = diagnose_environment(artifacts=tmp_path, expect=["cuda"])
    missing = [finding for finding in diagnosis.findings if finding.code == "missing-library"]
    assert {finding.text.partition(" ")[0] for finding in missing} == {"libcublas.so.99", "libcudnn.so.98"}
    assert {finding.severity for finding in missing} == {"problem"}
    assert all("99.*" in str(finding.hint) for finding in missing if "cublas" in finding.text)


def test_a_library_that_is_found_says_from_which_file() -> None:
    _, libraries = read_runtime()
    for library in libraries:
        assert (library.error is None) == (library.file is not None)
        assert library.file is None or Path(library.file).is_file()


@pytest.mark.parametrize(
    ("output", "failure", "reason"),
    [
        ("", "first line\n  expected CUDA,\n  got CPU", "expected CUDA, got CPU"),
        (
            "\x1b[1;31mx CUDA failure 100: no CUDA-capable device is detected ; GPU=-1",
            "f",
            "CUDA failure 100: no",
        ),
        ("Failed to create CUDAExecutionProvider. Require cuDNN 9.*\x1b[m", "f", "Failed to create CUDA"),
        ("", "RuntimeError: Please install TensorRT libraries", "Please install TensorRT"),
    ],
)
def test_the_cause_is_taken_from_where_it_is_said(output: str, failure: str, reason: str) -> None:
    assert parse_reason(output, failure).startswith(reason)
