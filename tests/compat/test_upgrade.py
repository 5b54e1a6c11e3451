"""ONNX Runtime is exchanged under a bundle: jobs go on with its fallback, which the new one optimises."""

from __future__ import annotations

import subprocess
import sys

import onnxruntime
import pytest

pytest.importorskip("onnx", reason="bundles are built here, and jobs have no onnx package")

from tests.stages.optimize.builders import assert_falls_back, prepare, run_elsewhere

pytestmark = pytest.mark.manual  # downloads ONNX Runtime

INSTALL = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("net"), channels=32)


@pytest.mark.parametrize("version", ["1.30.0", "1.31.1", "1.32.0"])
def test_another_version_loads_the_fallback_with_full_optimisation(prepared, tmp_path, version):
    if version.split(".")[:2] == onnxruntime.__version__.split(".")[:2]:
        pytest.skip("this version is installed")
    subprocess.run([*INSTALL, "--target", str(tmp_path), f"onnxruntime=={version}"], check=True)
    answer = run_elsewhere(prepared, [sys.executable], packages=tmp_path)
    assert_falls_back(prepared, answer, reason=f"got {version}")
