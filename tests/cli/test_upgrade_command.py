"""`ortprep upgrade-check`, with two versions of ONNX Runtime from PyPI."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import (
    FileEntry,
    VersionRange,
    read_loader_config,
    write_loader_config,
)
from tests.prepare.builders import Project

OLD = "1.23.2"
HERE = onnxruntime.__version__
PREPARED = Path(__file__).parents[1] / "compat" / "0.1.0" / "conv"
"""A bundle that this version reads, whatever prepared it."""


@pytest.fixture(scope="module")
def project(first_build, tmp_path_factory):
    """A project with a model that is prepared, and a bundle without a spec; it keeps the environments."""
    project = first_build[0].copy_to(tmp_path_factory.mktemp("upgrade") / "project")
    bind(shutil.copytree(PREPARED, project.bundle("conv")))
    return project


def bind(bundle):
    """Has the first variant require a newer ONNX Runtime than `OLD`, as graphs with its operators do."""
    config = read_loader_config(bundle)
    first, *others = config.variants
    needs = replace(first.requirements, onnxruntime=VersionRange("1.24"))
    variants = (replace(first, requirements=needs), *others)
    write_loader_config(bundle, replace(config, variants=variants))


def damage_answer(bundle):
    """Has the golden sample record an answer that no version gives, as if this one were wrong."""
    golden = bundle / "golden.npz"
    with np.load(golden) as arrays:
        recorded = dict(arrays)
    np.savez(golden, **{name: one + name.startswith("output:") for name, one in recorded.items()})
    config = read_loader_config(bundle)
    entry = FileEntry("golden.npz", golden.stat().st_size, digest_file(golden))
    write_loader_config(bundle, replace(config, golden=replace(config.golden, file=entry)))


def test_what_is_no_version_is_wrong_use(tmp_path):
    ended = Project(tmp_path).call("upgrade-check", "net", "--onnxruntime", "newest")
    assert ended.code == 2
    assert "expected versions as in 1.31.1,1.32.0" in ended.err


def test_what_was_not_prepared_is_named(tmp_path):
    ended = Project(tmp_path).call("upgrade-check", "net", "--onnxruntime", "1.31.1,1.32.0")
    assert ended.code == 3
    assert "no such bundle: net" in ended.err


@pytest.mark.slow
def test_bundles_and_their_sources_are_tried_on_every_version(project):
    asked = ("--onnxruntime", f"{HERE},{OLD}", "--rounds", "3")
    ended = project.run("upgrade-check", "net", "conv", *asked, "--json")
    assert ended.out, ended.err
    net, conv = json.loads(ended.out)
    assert ended.code == (1 if net["failures"] or conv["failures"] else 0)
    for check, ways in ((net, ("bundle", "source")), (conv, ("bundle",))):
        assert check["outcome"] == ("worse" if check["failures"] else "ok")
        found = [(run["case"]["way"], run["case"]["version"]) for run in check["runs"]]
        assert found == [(way, version) for way in ways for version in (HERE, OLD)]
        for run in check["runs"]:
            assert run["failure"] is None
            counts = {name: len(figure["values"]) for name, figure in run["figures"].items()}
            assert counts == {"ready": 3, "steady": 3, "private": 3}
            compared = ["ready", "steady", "private"] if run["case"]["version"] == OLD else []
            assert [change["figure"] for change in run["changes"]] == compared
    # The version that was asked for says itself which one it is.
    assert conv["runs"][1]["variant"] == "portable"
    assert conv["remarks"][0].startswith("its source is not compared: there is no spec configs/conv.yaml")
    assert conv["remarks"][-1].startswith(f"bundle on {OLD}: takes variant portable; passed over cpu: ")
    assert f"got {OLD}" in conv["remarks"][-1]


@pytest.mark.slow
def test_a_wrong_answer_fails_with_a_table_and_the_reason(project):
    damaged = shutil.copytree(project.bundle("conv"), project.root / "damaged")
    damage_answer(damaged)
    ended = project.run("upgrade-check", "damaged", "--onnxruntime", f"{HERE},{OLD}")
    assert ended.code == 1
    assert ended.out.count("fails") == 2
    assert "error: worse or wrong on another ONNX Runtime:" in ended.err
    for version in (HERE, OLD):
        assert re.search(rf"conv, bundle on {version}: .* does not answer as recorded", ended.err)


@pytest.mark.slow
def test_an_environment_has_numpy_and_onnx_runtime_only(project):
    ended = project.run("upgrade-check", "conv", "--onnxruntime", OLD, "--rounds", "3")
    assert ended.code == 0, ended.err
    packages = {
        info.name.partition("-")[0]
        for info in (project.root / "cache" / "environments").rglob("*.dist-info")
        if "_vendor" not in info.parts
    }
    assert {"numpy", "onnxruntime"} <= packages <= {"numpy", "onnxruntime", "pip", "setuptools"}


@pytest.mark.slow
def test_a_version_that_cannot_be_installed_says_what_pip_said(project):
    ended = project.run("upgrade-check", "conv", "--onnxruntime", "1.0.99")
    assert ended.code == 1
    assert "error: cannot install onnxruntime==1.0.99 numpy==" in ended.err
    assert "No matching distribution found for onnxruntime==1.0.99" in ended.err
