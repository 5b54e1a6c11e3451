"""`ortprep compare`, as a pipeline of continuous integration runs it."""

import dataclasses
import json
import shutil

import pytest

from ortprep.bundle.manifest import read_manifest, write_manifest
from tests.prepare.builders import Project
from tests.registry.builders import Build, Made, write_bundle

HERE = {"machine": "x86_64", "cpu_model": "processor", "cores": 4, "gpus": []}
SLOWER = Made("portable", init_ms=12.0)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture
def registry(project, monkeypatch):
    """A folder as registry, which the command finds by the environment."""
    monkeypatch.setenv("ORTPREP_REGISTRY", str(project.root / "registry"))
    return project.root / "registry"


def add(project, name, *made, hardware=HERE, **changes):
    """Writes a bundle below artifacts/ as a machine would have prepared it."""
    build = Build(made or (Made("portable"),), spec=name.encode())
    bundle = write_bundle(project.artifacts / name, build)
    return change(bundle, environment={"onnxruntime": "1.31.1", "hardware": hardware}, **changes)


def change(bundle, **changes):
    write_manifest(bundle, dataclasses.replace(read_manifest(bundle), **changes))
    return bundle


def outcome_of(project, *arguments):
    """Returns what `--json` says; that exit code and stderr agree with it is part of every test."""
    ended = project.call("compare", *arguments, "--json")
    data = json.loads(ended.out)
    assert ended.code == (0 if data["outcome"] == "ok" else 1)
    assert ended.err.startswith("error: ") == (ended.code == 1)
    return data


def test_what_is_no_worse_passes_and_what_is_worse_fails(project):
    add(project, "old")
    add(project, "new", Made("portable", init_ms=10.9))
    add(project, "worse", SLOWER)
    passed = project.call("compare", "old", "new", "--fail-over", "10%")
    assert (passed.code, passed.err) == (0, "")
    assert "within the limit" in passed.out
    failed = project.call("compare", "old", "worse", "--fail-over", "10%")
    assert failed.code == 1
    assert "regression" in failed.out
    assert failed.err.splitlines()[:2] == [
        "error: worse than before: old → worse",
        "  portable: ready, warm cache: 12 ms instead of 10 ms, 1.200×; expected at most 1.100×",
    ]


def test_a_manifest_alone_will_do_under_any_name(project):
    bundle = add(project, "net")
    shutil.copyfile(bundle / "manifest.json", project.root / "old-manifest.json")
    add(project, "new", SLOWER)
    for new in ("new", "artifacts/new", "artifacts/new/manifest.json"):
        assert outcome_of(project, "old-manifest.json", new)["outcome"] == "regression"
        assert outcome_of(project, new, new)["outcome"] == "ok"


def test_versions_of_a_registry_are_compared_without_their_weights(project, registry):
    add(project, "old")
    add(project, "new", SLOWER)
    for name in ("old", "new"):
        assert project.call("publish", name, "--label", name).code == 0
    assert project.call("promote", "net@old", "production").code == 0
    for path in registry.rglob("*"):
        if path.is_file() and path.read_bytes() in (b"weights", b"graph", b"golden"):
            path.unlink()
    pairs = (
        ("net@old", "net@new"),
        ("registry://net@production", "artifacts/new/manifest.json"),
        (f"file://{registry}/net@old", "registry://net"),
    )
    for pair in pairs:
        assert outcome_of(project, *pair)["outcome"] == "regression", pair
        assert (
            outcome_of(project, *pair, "--registry", str(registry), "--fail-over", "30%")["outcome"] == "ok"
        )
    assert outcome_of(project, "net@old", "old")["outcome"] == "ok"


def test_what_is_not_there_or_damaged_ends_with_3_and_a_wrong_use_with_2(project):
    bundle = add(project, "old")
    wrong = project.call("compare", "old", "old", "--fail-over", "speed=10%")
    assert (wrong.code, wrong.out) == (2, "")
    assert "no such figure: 'speed'" in wrong.err
    missing = project.call("compare", "old", "nothing")
    assert (missing.code, missing.out) == (3, "")
    assert "no such bundle: nothing" in missing.err
    path = bundle / "manifest.json"
    path.write_text(path.read_text().replace('"plan": "prepared"', '"plan": "defect"'))
    for new in ("old", "artifacts/old/manifest.json"):
        damaged = project.call("compare", "old", new)
        assert damaged.code == 3
        assert "changed after it was written" in damaged.err


def test_the_first_release_has_nothing_to_compare_with_and_passes_only_if_that_is_allowed(project, registry):
    add(project, "net", SLOWER)
    add(project, "other")
    first = ("net@production", "net", "--if-published")
    lacking = project.call("compare", *first[:2])
    assert (lacking.code, "no such" in lacking.err) == (5, True)
    for publish in (False, True):  # before anything is published, and before the alias points to it
        if publish:
            assert project.call("publish", "other", "--label", "1").code == 0
        passed = project.call("compare", *first)
        assert (passed.code, passed.out) == (0, "")
        assert "net@production is not published yet" in passed.err
    assert json.loads(project.call("compare", *first, "--json").out)["outcome"] == "ok"
    assert project.call("promote", "net@1", "production").code == 0
    worse = project.call("compare", *first)
    assert worse.code == 1
    assert "worse than before" in worse.err


def test_what_is_missing_or_lost_otherwise_fails_before_the_first_release_too(project, registry):
    add(project, "net")
    assert project.call("compare", "net@production", "nothing", "--if-published").code == 3
    assert project.call("compare", "nothing", "net", "--if-published").code == 3
    unreachable = ("--registry", "oci+http://127.0.0.1:9/models")
    assert project.call("compare", "net@production", "net", "--if-published", *unreachable).code == 5
    assert project.call("publish", "net", "--label", "1").code == 0
    assert project.call("promote", "net@1", "production").code == 0
    (version,) = registry.glob("net/versions/*")
    version.unlink()
    assert project.call("compare", "net@production", "net", "--if-published").code == 5


def test_the_command_needs_no_onnx_runtime(project):
    add(project, "old")
    code = "import sys; from ortprep.cli.app import run; run(); sys.exit('onnxruntime' in sys.modules)"
    ended = project.python("-c", code, "compare", "old", "old")
    assert (ended.code, ended.err) == (0, "")
