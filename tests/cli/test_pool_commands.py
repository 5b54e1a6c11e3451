"""`ortprep place` and `ortprep serve-check` on real bundles, as a user runs them."""

import json
import signal

import numpy as np
import pytest

from tests.prepare.builders import Project
from tests.runtime.builders import write_bundle
from tests.runtime.pool.builders import write_doubling, write_model_bundle


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_serve_check_drives_every_worker_and_checks_every_answer(project):
    write_bundle(project.root / "artifacts" / "linear")
    options = ("--devices", "cpu", "--workers-per-device", "2", "--requests", "200")
    done = project.run("serve-check", "linear", *options)
    assert done.code == 0, done.err
    assert "200 requests" in done.out
    assert "0 answered wrongly, 0 failed" in done.out
    assert "cpu/0" in done.out
    assert "cpu/1: ready" in done.err
    found = json.loads(project.run("serve-check", "linear", *options, "--json").out)
    assert found["drive"]["wrong"] == found["drive"]["failed"] == 0
    assert sum(worker["served"] for worker in found["pool"]["workers"]) == 200


def test_serve_check_of_a_model_that_answers_wrongly_fails(project):
    x = np.ones((2, 2), np.float32)
    both = {"float": ("float32", ("a", "b"))}
    write_model_bundle(
        project.root / "artifacts" / "liar",
        {"y": ("Add", ("x", "x"))},
        {"x": both["float"]},
        {"y": both["float"]},
        {"input:x": x, "output:y": 3 * x},
    )
    done = project.run("serve-check", "liar", "--devices", "cpu")
    assert done.code == 4
    assert "does not answer as recorded" in done.err


def test_place_says_where_and_why(project):
    write_bundle(project.root / "artifacts" / "linear")
    write_doubling(project.root / "artifacts" / "doubling")
    done = project.run("place", "linear", "doubling", "--devices", "cpu")
    assert done.code == 0, done.err
    assert "linear" in done.out
    assert "which was least loaded" not in done.out  # of one device nothing is
    found = json.loads(project.run("place", "linear", "doubling", "--json").out)
    assert sorted(found["placement"]["assignments"][0]["models"]) == ["doubling", "linear"]


def test_what_is_not_there_is_an_error_with_a_command(project):
    done = project.run("serve-check", "nosuch")
    assert done.code == 3
    assert "hint: ortprep prepare nosuch" in done.err
    write_bundle(project.root / "artifacts" / "linear")
    done = project.run("serve-check", "linear", "--devices", "cuda:99")
    assert done.code == 1
    assert "no such device" in done.err


def test_an_interrupt_ends_it_at_once(project):
    write_bundle(project.root / "artifacts" / "linear")
    process = project.start(
        "-m", "ortprep", "serve-check", "linear", "--devices", "cpu", "--requests", "100000000"
    )
    assert process.stderr is not None
    assert any("ready" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(300) == 130
    finally:
        process.kill()
        process.communicate()


@pytest.mark.attack
def test_serve_config_serves_this_machine_alone_unless_it_is_told_otherwise(project):
    write_doubling(project.root / "artifacts" / "doubling")
    done = project.run("serve-config", "doubling", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["http_options"]["host"] == "127.0.0.1"
    assert "warning" not in done.err
    done = project.run("serve-config", "doubling", "--json", "--host", "0.0.0.0")
    assert json.loads(done.out)["http_options"]["host"] == "0.0.0.0"
    assert "anyone who reaches 0.0.0.0 can send requests" in done.err
    done = project.run("serve-config", "doubling", "--json", "--host", "0.0.0.0", "--token-env", "TOKEN")
    assert "warning" not in done.err
