"""Builds on terminals, in pipes, with other people's files about."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.builders import write_external_model
from tests.fakes import serve
from tests.prepare.builders import REPOSITORY, SHAPES, Outcome, Project, all_tasks, done, folding_net

# -- on a terminal there is something to see; what is written is the same, and the build ends

DOIT = ["-m", "doit", "-f", str(REPOSITORY / "dodo.py"), "configs={configs}", "artifacts={artifacts}"]
COMMANDS = {
    "ortprep": ["-m", "ortprep", "prepare", "net"],
    "doit": [*DOIT, "verify"],
    "doit, two at once": [*DOIT, "-n", "2", "verify"],
}
LIKE_ANOTHER = ("doit, two at once",)


def run_on_terminal(project, arguments):
    """Runs Python on a pseudo-terminal and returns its exit code and what stood there, without colours."""
    folders = {"configs": project.configs, "artifacts": project.artifacts}
    code, written = project.on_terminal(*(argument.format_map(folders) for argument in arguments))
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(command, id=name, marks=pytest.mark.manual if name in LIKE_ANOTHER else ())
        for name, command in COMMANDS.items()
    ],
)
def test_a_build_on_a_terminal_shows_what_runs_and_ends(project, arguments):
    project.add(folding_net(), inputs=SHAPES)
    code, shown = run_on_terminal(project, arguments)
    assert code == 0, shown
    assert re.search(r"[⠁-⣿] [a-z]+:net", shown), "nothing was shown while a task ran"
    last, count = ("package:net", 7) if "ortprep" in arguments else ("verify:net/portable", 5)
    assert f"done {last}" in shown
    if "package" in last:
        assert re.search(r"measure:net/cpu +0:\d\d:\d\d +\d+% +0:\d\d:\d\d", shown)
    assert f"{count} done, 0 up to date" in shown


def test_a_failure_on_a_terminal_is_told_once(project):
    project.write_spec(source={"path": "missing.onnx"})
    code, shown = run_on_terminal(project, COMMANDS["ortprep"])
    assert code != 0
    assert shown.count("FAILED fetch:net") == 1
    assert shown.count("Traceback") == 0


# -- what the build's own process is, and what it keeps to itself


PREPARE = """
import json, sys
from ortprep.cli.app import run

sys.argv = ["ortprep", "--log", "debug", "prepare"]
code = run()
peak_kb = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"code": code, "modules": sorted(sys.modules), "peak_mb": peak_kb / 1024}))
"""

SECRET = "s3cr3t-t0k3n"


def find_everywhere(root, text):
    """Returns the files below a folder that hold a text."""
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and (text.encode() in path.read_bytes() or text in path.name)
    ]


@dataclass(frozen=True)
class Built:
    """A project whose source needs a token, and what its build said, of itself (`PREPARE`) too."""

    project: Project
    outcome: Outcome
    asked: list[str]

    @property
    def process(self):
        said: dict[str, Any] = json.loads(self.outcome.out)
        return said


@pytest.fixture(scope="module")
def fetched_with_token(tmp_path_factory):
    project = Project(tmp_path_factory.mktemp("token") / "project")
    with serve_model(project.root.with_name("shipped")) as server:
        project.write_spec(inputs=SHAPES, source={"url": f"{server.url}/net.onnx?token={SECRET}"})
        outcome = project.python("-c", PREPARE)
        return Built(project, outcome, [path for path, _ in server.requests])


@contextmanager
def serve_model(folder):
    """Serves a model with external data."""
    model = write_external_model(folding_net(), folder / "net.onnx")
    with serve() as server:
        server.files |= {
            f"/{path.name}": path.read_bytes() for path in (model, model.with_name("weights.bin"))
        }
        yield server


@pytest.mark.slow
def test_the_builds_process_stays_small_and_never_imports_what_reads_models(fetched_with_token):
    process = fetched_with_token.process
    assert process["code"] == 0, fetched_with_token.outcome.err
    assert done(fetched_with_token.outcome) == all_tasks()
    assert {"onnx", "onnxruntime", "google.protobuf", "torch"} & set(process["modules"]) == set()
    assert process["peak_mb"] < 300


@pytest.mark.slow
def test_a_token_in_a_sources_url_is_used_and_never_written_or_shown(fetched_with_token):
    project = fetched_with_token.project
    assert fetched_with_token.asked == [f"/net.onnx?token={SECRET}", f"/weights.bin?token={SECRET}"]
    asked = (("show", "net"), ("show", "net", "--json"), ("explain", "--json"))
    for said in (fetched_with_token.outcome, *(project.run(*arguments) for arguments in asked)):
        assert said.code == 0
        assert SECRET not in said.out + said.err
    assert find_everywhere(project.root, SECRET) == ["configs/net.yaml"]


@pytest.mark.slow
def test_a_token_in_a_url_that_fails_is_not_shown(project):
    with serve() as server:
        project.write_spec(source={"url": f"{server.url}/gone.onnx?token={SECRET}"})
        outcome = project.run("--log", "debug", "prepare")
    assert outcome.code == 1
    assert "/gone.onnx" in outcome.err
    assert "404" in outcome.err
    assert SECRET not in outcome.out + outcome.err


@pytest.mark.slow
def test_a_url_with_a_password_is_refused_before_anything_is_fetched(project):
    with serve() as server:
        project.write_spec(source={"url": server.url.replace("//", f"//me:{SECRET}@") + "/net.onnx"})
        outcome = project.run("prepare")
    assert outcome.code == 2
    assert "without user and password" in outcome.err
    assert SECRET not in outcome.out + outcome.err
    assert server.requests == []


@pytest.mark.slow
def test_another_token_means_the_same_model(tmp_path):
    project = Project(tmp_path / "project")
    with serve_model(tmp_path / "shipped") as server:
        project.write_spec(inputs=SHAPES, source={"url": f"{server.url}/net.onnx?token=one"})
        assert project.doit("fetch").code == 0
        project.write_spec(inputs=SHAPES, source={"url": f"{server.url}/net.onnx?token=two"})
        assert "fetch" not in project.explain()
