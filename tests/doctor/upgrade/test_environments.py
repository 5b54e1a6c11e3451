from __future__ import annotations

from importlib import metadata

import pytest

from ortprep.bundle.manifest import Manifest, SourceRecord
from ortprep.doctor.upgrade import environments
from ortprep.doctor.upgrade.environments import list_requirements, open_environment, parse_versions
from ortprep.errors import CacheError, InstallationError, SpecError

NUMPY = f"numpy=={metadata.version('numpy')}"
SOURCE = SourceRecord("path", "m.onnx", "sha256:0", (), {}, 8, {}, 0)


def record(*packages: str) -> Manifest:
    environment = {"packages": dict.fromkeys(packages, "1.0")}
    return Manifest("1.4", "m", "2026-01-01T00:00:00+00:00", "0.1.0", "sha256:0", SOURCE, environment, (), ())


def test_versions_are_separated_by_commas_and_count_once():
    assert parse_versions("1.31.1, 1.32.0,1.31.1") == ("1.31.1", "1.32.0")
    assert parse_versions("1.33.0rc1,1.33.0.dev20261101") == ("1.33.0rc1", "1.33.0.dev20261101")


@pytest.mark.parametrize(
    "text", ["", "1.31.1,", "newest", "../1.31", "1.31.1 --index-url=x", "-r x", "1.31*", "1", "1.2@url"]
)
def test_what_is_no_version_never_gets_to_pip(text):
    with pytest.raises(SpecError, match="not a version of ONNX Runtime"):
        parse_versions(text)


def test_a_bundle_for_the_cpu_needs_the_cpu_wheel_whatever_it_was_made_with():
    made = record("onnxruntime-gpu", "nvidia-cudnn")
    assert list_requirements(made, "1.31.1", gpu=False) == ("onnxruntime==1.31.1", NUMPY)


def test_a_bundle_for_a_gpu_needs_its_wheel_and_the_libraries_it_was_made_with():
    assert list_requirements(record(), "1.31.1", gpu=True) == ("onnxruntime-gpu==1.31.1", NUMPY)
    expected = ("onnxruntime-gpu[cuda,cudnn]==1.31.1", NUMPY)
    assert list_requirements(record("nvidia-cudnn-cu13"), "1.31.1", gpu=True) == expected


@pytest.mark.attack
def test_a_python_that_another_user_put_into_the_cache_is_not_run(tmp_path, monkeypatch):
    cache, ran = tmp_path / "cache", tmp_path / "ran"
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(cache))
    key = environments._environment_key(["onnxruntime==1.31.1"])
    python = cache / "environments" / key / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho > {ran}\necho '[]'\n")
    python.chmod(0o755)
    cache.chmod(0o777)
    with pytest.raises(CacheError, match="not safe to use"):
        open_environment(["onnxruntime==1.31.1"], tmp_path / "folder")
    assert not ran.exists()


@pytest.mark.attack
def test_configuration_of_uv_in_the_working_folder_is_not_obeyed(tmp_path, monkeypatch):
    """A clone's `uv.toml` names an index whose `onnxruntime` would run, now and at each later check."""
    clone, programs, called = tmp_path / "clone", tmp_path / "programs", tmp_path / "called"
    for folder in (clone, programs):
        folder.mkdir()
    (clone / "uv.toml").write_text('[[index]]\nurl = "./wheels"\nformat = "flat"\n')
    uv = programs / "uv"
    uv.write_text(f'#!/bin/sh\necho "$PWD: $*" >> {called}\nfor last; do :; done\nmkdir -p "$last"\n')
    uv.chmod(0o755)
    monkeypatch.chdir(clone)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(InstallationError):
        open_environment(["onnxruntime==1.31.1"], tmp_path / "folder")
    lines = called.read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"{tmp_path}/cache/environments/")
        assert " --no-config " in line
