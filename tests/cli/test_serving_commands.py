"""`ortprep place`, `serve-config` and `host` on real bundles, as a user runs them."""

import json
from contextlib import contextmanager

import pytest

from ortprep.errors import BundleError, LoadError
from ortprep.runtime import connect
from tests.fakes import wait_for
from tests.prepare.builders import Project, finish
from tests.registry.builders import write_keys
from tests.runtime.builders import assert_answers, write_bundle
from tests.runtime.pool.builders import write_doubling


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.mark.attack
def test_serve_config_serves_this_machine_alone_unless_it_is_told_otherwise(project):
    write_doubling(project.root / "artifacts" / "doubling")
    done = project.call("serve-config", "doubling", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["http_options"]["host"] == "127.0.0.1"
    assert "warning" not in done.err
    done = project.call("serve-config", "doubling", "--json", "--host", "0.0.0.0")
    assert json.loads(done.out)["http_options"]["host"] == "0.0.0.0"
    assert "anyone who reaches 0.0.0.0 can send requests" in done.err
    done = project.call("serve-config", "doubling", "--json", "--host", "0.0.0.0", "--token-file", "/token")
    assert "warning" not in done.err


@pytest.fixture
def hosted(tmp_path, monkeypatch):
    made = Project(tmp_path)
    write_bundle(made.artifacts / "linear")
    monkeypatch.setenv("XDG_RUNTIME_DIR", made.environment()["XDG_RUNTIME_DIR"])
    return made


@contextmanager
def running(hosted, *arguments):
    """A host, which has ended well afterwards."""
    process = hosted.start("-m", "ortprep", "host", *arguments)
    try:
        wait_for(lambda: (hosted.root / "locks/ortprep/host/socket").exists(), what="the host is ready")
        yield process
    finally:
        process.terminate()
        ended = finish(process)
    assert (ended.code, ended.out) == (0, "")
    assert "Traceback" not in ended.err


def test_a_host_serves_models_by_name_and_says_what_it_does(hosted):
    with running(hosted, "linear"):
        with connect("linear") as session:
            assert_answers(session)
        with pytest.raises(LoadError, match="did you mean 'linear'"):
            connect("liner")
        found = json.loads(hosted.call("host", "--status", "--json").out)
        assert found["models"] == [
            {"name": "linear", "bundle": str(hosted.artifacts / "linear"), "variant": "cpu"}
        ]
        shown = hosted.call("host", "--status")
        assert (shown.code, "loaded, variant cpu" in shown.out) == (0, True)
        second = hosted.call("host", "linear")
        assert (second.code, "a host runs already" in second.err) == (1, True)
        stopped = hosted.call("host", "--stop")
        assert (stopped.code, f"process {found['pid']}" in stopped.err) == (0, True)
    assert list((hosted.root / "locks/ortprep/host").iterdir()) == []


def test_without_a_host_there_is_nothing_to_show_or_to_stop(hosted):
    assert [hosted.call("host", option).code for option in ("--status", "--stop")] == [1, 0]
    shown = hosted.call("host", "--status", "--json")
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
def test_wrong_arguments_are_errors_and_no_host_is_left(hosted, arguments, problem):
    write_bundle(hosted.artifacts / "copy")
    ended = hosted.call("host", *arguments)
    assert ended.code != 0
    assert problem in " ".join(ended.err.replace("│", " ").split())


@pytest.mark.attack
def test_a_host_that_requires_a_signature_loads_nothing_without(hosted):
    _, public = write_keys(hosted.root / "keys")
    with (
        running(hosted, "linear", "--require-signature", str(public)),
        pytest.raises(BundleError, match="not from a registry"),
    ):
        connect("linear")
