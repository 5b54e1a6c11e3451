from __future__ import annotations

from importlib import metadata

import pytest

from ortprep.bundle.manifest import Manifest, SourceRecord
from ortprep.diagnose.upgrade.environments import list_requirements, parse_versions
from ortprep.errors import SpecError

NUMPY = f"numpy=={metadata.version('numpy')}"
SOURCE = SourceRecord("path", "m.onnx", "sha256:0", (), {}, 8, {}, 0)


def record(*packages: str) -> Manifest:
    environment = {"packages": dict.fromkeys(packages, "1.0")}
    return Manifest("1.4", "m", "2026-01-01T00:00:00+00:00", "0.1.0", "sha256:0", SOURCE, environment, (), ())


def test_versions_are_separated_by_commas_and_count_once() -> None:
    assert parse_versions("1.31.1, 1.32.0,1.31.1") == ("1.31.1", "1.32.0")
    assert parse_versions("1.33.0rc1,1.33.0.dev20261101") == ("1.33.0rc1", "1.33.0.dev20261101")


@pytest.mark.parametrize(
    "text", ["", "1.31.1,", "newest", "../1.31", "1.31.1 --index-url=x", "-r x", "1.31*", "1", "1.2@url"]
)
def test_what_is_no_version_never_gets_to_pip(text: str) -> None:
    with pytest.raises(SpecError, match="not a version of ONNX Runtime"):
        parse_versions(text)


def test_a_bundle_for_the_cpu_needs_the_cpu_wheel_whatever_it_was_made_with() -> None:
    made = record("onnxruntime-gpu", "nvidia-cudnn")
    assert list_requirements(made, "1.31.1", gpu=False) == ("onnxruntime==1.31.1", NUMPY)


def test_a_bundle_for_a_gpu_needs_its_wheel_and_the_libraries_it_was_made_with() -> None:
    assert list_requirements(record(), "1.31.1", gpu=True) == ("onnxruntime-gpu==1.31.1", NUMPY)
    expected = ("onnxruntime-gpu[cuda,cudnn]==1.31.1", NUMPY)
    assert list_requirements(record("nvidia-cudnn-cu13"), "1.31.1", gpu=True) == expected
