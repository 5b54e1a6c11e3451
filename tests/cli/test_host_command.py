"""`ortprep host` as a user runs it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ortprep.errors import BundleError, LoadError
from ortprep.runtime import connect
from tests.fakes import wait_for
from tests.prepare.builders import Project, finish
from tests.registry.builders import write_keys
from tests.runtime.builders import sample, weights_of, write_bundle


@pytest.fixture
def project(tmp_path, monkeypatch):
    made = Project(tmp_path)
    write_bundle(made.artifacts / "linear")
    monkeypatch.setenv("XDG_RUNTIME_DIR", made.environment()["XDG_RUNTIME_DIR"])
    return made


@contextmanager
def running(project: Project, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A host, which has ended well afterwards."""
    process = project.start("-m", "ortprep", "host", *arguments)
    try:
        wait_for(lambda: (project.root / "locks/ortprep/host/socket").exists(), what="the host is ready")
        yield process
    finally:
        process.terminate()
        ended = finish(process)
    assert (ended.code, ended.out) == (0, "")
    assert "Traceback" not in ended.err


def test_a_host_serves_models_by_name_and_says_what_it_does(project):
    with running(project, "linear"):
        with connect("linear") as session:
            np.testing.assert_allclose(
                session.run(None, {"x": sample()})[0], sample() @ weights_of(0), rtol=1e-5
            )
        with pytest.raises(LoadError, match="did you mean 'linear'"):
            connect("liner")
        found = json.loads(project.call("host", "--status", "--json").out)
        assert found["models"] == [
            {"name": "linear", "bundle": str(project.artifacts / "linear"), "variant": "cpu"}
        ]
        shown = project.call("host", "--status")
        assert (shown.code, "loaded, variant cpu" in shown.out) == (0, True)
        second = project.call("host", "linear")
        assert (second.code, "a host runs already" in second.err) == (1, True)
        stopped = project.call("host", "--stop")
        assert (stopped.code, f"process {found['pid']}" in stopped.err) == (0, True)
    assert list((project.root / "locks/ortprep/host").iterdir()) == []


def test_without_a_host_there_is_nothing_to_show_or_to_stop(project):
    assert [project.call("host", option).code for option in ("--status", "--stop")] == [1, 0]
    shown = project.call("host", "--status", "--json")
    assert (shown.code, json.loads(shown.out)) == (1, None)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--idle", "10"), "a number with a unit, as in 90s, 10m or 8h"),
        (("--idle", "-1m"), "a number with a unit"),
        (("--max-memory", "4T"), "as in 4G"),
        (("--digests", "never"), "expected one of changed, full, off"),
        (("nosuch",), "no such bundle"),
        (("linear", "copy"), "two models have the name linear"),
    ],
)
def test_wrong_arguments_are_errors_and_no_host_is_left(project, arguments, problem):
    write_bundle(project.artifacts / "copy")
    ended = project.call("host", *arguments)
    assert ended.code != 0
    assert problem in " ".join(ended.err.replace("│", " ").split())


@pytest.mark.attack
def test_a_host_that_requires_a_signature_loads_nothing_without(project):
    _, public = write_keys(project.root / "keys")
    with (
        running(project, "linear", "--require-signature", str(public)),
        pytest.raises(BundleError, match="not from a registry"),
    ):
        connect("linear")
