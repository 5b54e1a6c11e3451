"""ONNX Runtime in children: the installed one, and planted ones that are broken, old or without CUDA."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ortprep.bundle.codec import decode
from ortprep.doctor.environment import describe, diagnose_environment
from ortprep.doctor.environment_facts import Facts, parse_reason, read_runtime, try_providers
from ortprep.runtime.loading.session import CPU
from ortprep.versions import installed_onnxruntime, read_wheels
from tests.doctor.environment.builders import WITHOUT_GPU, codes, one
from tests.doctor.environment.test_rules import plant_wheel

REPOSITORY = str(Path(__file__).parents[3])

PLANTED = """\
__version__ = "{version}"
package_name = "{package}"
cuda_version = ""
def get_build_info(): return "planted"
def get_available_providers(): return {providers!r}
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder from which this process and its children import first."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def _plant_package(site, text):
    package = site / "onnxruntime"
    package.mkdir()
    (package / "__init__.py").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("may_write", [False, True])
def test_missing_bytecode_is_found_where_a_process_cannot_write_it(may_write, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "" if may_write else "1")
    assert (read_runtime().bytecode.missing > 50) is not may_write


def test_the_installed_version_is_read():
    runtime = read_runtime()
    assert runtime.version == installed_onnxruntime()
    assert CPU in runtime.available


def test_a_provider_is_usable_only_if_a_session_ran():
    reasons = try_providers([CPU, "MoonExecutionProvider"])
    assert reasons[CPU] is None
    assert reasons["MoonExecutionProvider"]


def test_figures_are_json_from_which_the_same_is_found_elsewhere(tmp_path):
    diagnosis = diagnose_environment(artifacts=tmp_path, expect=["cpu"])
    assert describe(decode(Facts, json.loads(json.dumps(diagnosis.figures)))) == diagnosis
    assert {"ONNX Runtime", "Machine"} <= {table.title for table in diagnosis.tables}


def describe_planted(**changes):
    """Returns what is found of the ONNX Runtime that is installed now; no session is made."""
    return describe(replace(WITHOUT_GPU, wheels=read_wheels(), runtime=read_runtime(), **changes))


def test_what_a_removed_wheel_left_behind_is_a_broken_import(site):
    plant_wheel(site, "onnxruntime", "1.31.1")
    _plant_package(site, "")
    found = one(describe_planted().findings, "onnxruntime-broken")
    assert "get_build_info" in found.text or "__version__" in found.text


def test_a_process_that_dies_of_the_import_is_a_broken_import(site):
    _plant_package(site, "import os; os.abort()\n")
    assert "SIGABRT" in str(read_runtime().error)


def test_no_onnxruntime_at_all_is_found(monkeypatch):
    monkeypatch.setattr(
        sys, "path", [REPOSITORY, *(entry for entry in sys.path if "site-packages" not in entry)]
    )
    assert one(describe_planted().findings, "no-onnxruntime").hint == "pip install onnxruntime"


def test_an_old_version_and_a_wheel_of_another_are_found(site):
    plant_wheel(site, "onnxruntime", "1.31.1")
    _plant_package(site, PLANTED.format(version="1.16.3", package="onnxruntime", providers=[CPU]))
    found = codes(describe_planted().findings)
    assert {"onnxruntime-too-old", "onnxruntime-version-differs"} <= found


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
def test_the_cause_is_taken_from_where_it_is_said(output, failure, reason):
    assert parse_reason(failure, output).startswith(reason)
