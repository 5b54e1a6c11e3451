"""`ortprep doctor` on real models, as a user runs it."""

import json
import signal

import pytest

from ortprep.doctor.parallel import WORKERS
from tests.builders import conv_net, write_model
from tests.fakes import wait_for
from tests.prepare.builders import Project, finish
from tests.runtime.builders import write_bundle


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def ask(project, *arguments):
    """Returns what a check came to; that the exit code agrees is part of every test."""
    ended = project.call("doctor", *arguments, "--json")
    (found,) = json.loads(ended.out)
    problems = [one for one in found["findings"] if one["severity"] == "problem"]
    assert ended.code == (1 if problems else 0), ended.err
    return found


def test_what_is_expected_and_not_there_is_a_failure(project):
    found = ask(project, "env", "--expect", "tensorrt")
    assert "problem" in {one["severity"] for one in found["findings"]}


@pytest.mark.slow
def test_a_source_and_a_bundle_are_examined_each_by_itself(project):
    write_model(conv_net(), project.root / "net.onnx")
    write_bundle(project.artifacts / "linear")
    for name, expected in (("net.onnx", "default"), ("linear", "prepared"), ("artifacts/linear", "prepared")):
        assert set(ask(project, "init", name, "--rounds", "1")["figures"]) == {"device", expected}


def test_a_doctor_that_is_asked_to_end_leaves_nothing(project):
    write_model(conv_net(), project.root / "net.onnx")
    process = project.start("-m", "ortprep", "doctor", "init", "net.onnx", "--rounds", "99")
    while "init" not in (line := process.stderr.readline()):
        assert line, "the doctor ended before it began"
    wait_for(lambda: list((project.root / "tmp").glob("ortprep-child-*/*")), what="a process is measured")
    process.terminate()
    assert finish(process).code == 128 + signal.SIGTERM
    assert list((project.root / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_model_is_served_by_every_number_of_workers(project):
    write_model(conv_net(), project.root / "net.onnx")
    found = ask(project, "parallel", "net.onnx")
    figures = found["figures"]
    assert figures["failures"] == {}
    assert {setup["workers"] for setup in figures["setups"]} == set(WORKERS)
    assert len(figures["rounds"]) == len(figures["setups"])
    for rounds in figures["rounds"].values():
        assert len(rounds) >= 3
        assert min(one[name] for one in rounds for name in ("ready_ms", "run_ms", "runs_per_s")) > 0
    (table,) = found["tables"]
    assert len(table["rows"]) == len(figures["setups"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("init", "nothing"),
        ("init", "a", "b"),
        ("env", "a"),
        ("parallel", "a", "--devices", "tpu"),
        ("env", "--shape", "x=1"),
        ("init", "a", "--shape", "nonsense"),
    ],
)
def test_wrong_use_is_told(project, arguments):
    ended = project.call("doctor", *arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert arguments != ("init", "nothing") or "no such model: nothing" in ended.err
