"""`ortprep doctor` on real models, as a user runs it."""

from __future__ import annotations

import json
import signal

import pytest

from ortprep.doctor.parallel.experiment import WORKERS
from ortprep.doctor.parallel.findings import WAYS
from tests.builders import conv_net, embedding, two_inputs, write_model
from tests.fakes import wait_for
from tests.prepare.builders import SHAPES, Project, finish, folding_net
from tests.runtime.builders import write_bundle


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def ask(project, *arguments):
    """Returns what each check came to; that the exit code agrees is part of every test."""
    ended = project.run("doctor", *arguments, "--json")
    found = {one["check"]: one for one in json.loads(ended.out)}
    problems = [one for check in found.values() for one in check["findings"] if one["severity"] == "problem"]
    assert ended.code == (1 if problems else 0), ended.err
    return found


@pytest.mark.slow
def test_without_arguments_the_machine_is_examined(project):
    found = ask(project)
    assert set(found) == {"env", "parallel"}
    assert all(one["findings"] for one in found.values())


def test_what_is_expected_and_not_there_is_a_failure(project):
    found = ask(project, "env", "--expect", "tensorrt")
    assert "problem" in {one["severity"] for one in found["env"]["findings"]}


@pytest.mark.slow
def test_an_onnx_file_is_examined_and_what_is_assumed_is_said(project):
    write_model(embedding(), project.root / "words.onnx")
    ended = project.run("doctor", "init", "words.onnx", "--rounds", "1")
    assert ended.code == 0, ended.err
    assert "parse the model file" in ended.out
    assert "graph transformers" in ended.out
    assert "is assumed; --shape" in ended.err


@pytest.mark.slow
def test_a_trace_for_perfetto_is_kept(project):
    write_model(conv_net(), project.root / "net.onnx")
    assert project.run("doctor", "profile", "net.onnx", "--shape", "nonsense").code == 2
    found = ask(project, "profile", "net.onnx", "--trace", "here.json")["profile"]
    assert "trace-written" in {one["code"] for one in found["findings"]}
    assert set(found["figures"]["ran"]) == {"CPUExecutionProvider"}
    events = json.loads((project.root / "here.json").read_text())
    complete = [event for event in events if event["ph"] == "X"]
    assert {"name", "ts", "dur", "pid", "tid"} <= set.intersection(*(set(event) for event in complete))


@pytest.mark.slow
def test_a_spec_s_source_is_fetched_and_a_bundle_examined_beside_it_or_alone(project, built):
    project.add(folding_net(), inputs=SHAPES)
    write_bundle(project.artifacts / "linear")
    for where, name, expected in (
        (project, "net", {"default"}),
        (built, "net", {"default", "prepared"}),
        (project, "linear", {"prepared"}),
        (project, "artifacts/linear", {"prepared"}),
    ):
        assert set(ask(where, "init", name, "--rounds", "1")["init"]["figures"]) == {"device", *expected}


@pytest.mark.slow
def test_models_of_one_file_name_and_a_bundle_run_at_once_with_inputs_of_their_own(project):
    for folder, model in (("one", embedding()), ("two", two_inputs())):
        write_model(model, project.root / folder / "model.onnx")
    write_bundle(project.artifacts / "linear")
    models = ("one/model.onnx", "two/model.onnx", "linear")
    name = embedding().graph.input[0].name
    wrong = project.run("doctor", "parallel", *models, "--shape", "nothing=1")
    assert wrong.code == 2
    assert name in wrong.err
    right = project.run("doctor", "parallel", *models, "--shape", f"{name}=2,3", "--json")
    assert f"{name}: shape" not in right.err
    (found,) = json.loads(right.out)
    assert found["subject"] == "model, linear"
    assert found["figures"]["ways"]["failures"] == {}
    assert found["figures"]["workers"] is None
    assert [len(table["rows"]) for table in found["tables"]] == [3, 3, 3]


def test_a_trace_never_replaces_the_model(project):
    model = write_model(conv_net(), project.root / "net.onnx")
    before = model.read_bytes()
    assert project.run("doctor", "profile", "net.onnx", "--trace", "net.onnx").code == 2
    assert model.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_doctor_that_is_asked_to_end_leaves_nothing(project, number):
    write_model(conv_net(), project.root / "net.onnx")
    process = project.start("-m", "ortprep", "doctor", "options", "net.onnx", "--rounds", "99")
    assert process.stderr is not None
    while "options" not in (line := process.stderr.readline()):
        assert line, "the doctor ended before it began"
    wait_for(lambda: list((project.root / "tmp").glob("ortprep-options-*/*")), what="a copy is written")
    process.send_signal(number)
    assert finish(process).code == 128 + number
    assert list((project.root / "tmp").iterdir()) == []


def test_a_model_s_names_are_no_orders_to_a_terminal(project):
    model = two_inputs()
    model.graph.node[0].name = "\x1b[31mred[/red]\nenv: PROBLEM: forged"
    write_model(model, project.root / "net.onnx")
    ended = project.run("doctor", "profile", "net.onnx")
    assert ended.code == 0, ended.err
    assert "\x1b" not in ended.out + ended.err
    assert not [line for line in ended.out.splitlines() if line.startswith("env:")]


@pytest.mark.slow
def test_every_check_is_made_and_one_that_cannot_be_keeps_no_other_s_answer_back(project):
    write_model(conv_net(), project.root / "net.onnx")
    (project.root / ".tmp-net.json").mkdir()  # where the profile writes its trace before it is whole
    found = ask(project, "all", "net.onnx", "--rounds", "1", "--trace", "net.json")
    assert list(found) == ["env", "init", "options", "parallel", "profile", "all"]
    assert {one["code"] for one in found["profile"]["findings"]} == {"check-failed"}
    check_start(found["init"])
    check_ways_to_load(found["options"])
    check_sessions(found["parallel"]["figures"])
    conclusion = found["all"]["findings"]
    assert conclusion[0]["code"] == "what-dominates"
    assert "check-failed" in {one["code"] for one in conclusion}


def check_start(found):
    """Checks that the start is a waterfall whose phases add up."""
    waterfall, transformers = found["tables"][:2]
    assert waterfall["bars"] == "ms"
    index = waterfall["columns"].index("ms")
    total = sum(row[index] for row in waterfall["rows"])
    assert total == pytest.approx(found["figures"]["default"]["total_ms"])
    assert transformers["rows"]
    assert len([one for one in found["findings"] if one["code"].startswith("phases-")]) == 1


def check_ways_to_load(found):
    """Checks that every way to load the model was measured."""
    ways = {"default", "no optimisation", "mapped", "mapped, no prepacking"}
    assert set(found["figures"]["results"]) == ways
    assert not found["figures"]["failures"]
    assert [len(table["rows"]) for table in found["tables"]] == [4]


def check_sessions(figures):
    """Checks that sessions were made in every way, and served by every number of workers."""
    ways, workers = figures["ways"], figures["workers"]
    assert (ways["failures"], workers["failures"]) == ({}, {})
    assert set(ways["rounds"]) == set(WAYS)
    assert {setup["workers"] for setup in figures["setups"]} == set(WORKERS)
    assert len(workers["rounds"]) == len(figures["setups"])
    count = len(figures["models"])
    assert [model["name"] for model in figures["models"]] == [f"net #{n + 1}" for n in range(count)]
    for rounds in ways["rounds"].values():
        assert len(rounds) >= 3
        for measured in rounds:
            assert len(measured["run_ms"]) == count
            assert min(*measured["run_ms"], measured["runs_per_s"]) > 0
            assert 0 < measured["creating_ms"] < measured["ready_ms"]
            assert 0 < measured["start_ms"] < measured["ready_ms"]
    assert set(figures["verdicts"]) == {"create", "run"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("init",),
        ("all",),
        ("init", "a", "b"),
        ("init", "a", "--rounds", "0"),
        ("env", "a"),
        ("parallel", "--devices", "tpu"),
        ("env", "--rounds", "3"),
        ("parallel", "--trace", "x.json"),
        ("init", "a", "--expect", "cuda"),
        ("env", "--shape", "x=1"),
        ("profile", "a", "--trace", "nowhere/x.json"),
        ("profile", "a", "--trace", "."),
    ],
)
def test_wrong_use_is_told(project, arguments):
    ended = project.run("doctor", *arguments)
    assert ended.code == 2
    assert ended.out == ""


def test_a_model_that_is_not_there_is_told(project):
    ended = project.run("doctor", "init", "nothing")
    assert ended.code == 2
    assert "no such model: nothing" in ended.err
