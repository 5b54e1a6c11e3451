"""`prepare` in a program acts as the command does, with the same receipts and errors, and no side effects."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from ortprep import BuildEvent, prepare
from ortprep.children.availability import unavailable_reason
from ortprep.errors import SourceError, SpecError
from ortprep.runtime import load
from ortprep.spec.reading import read_spec
from ortprep.versions import install_command
from tests.prepare.builders import QUICK, SHAPES, UNTUNED, Project, answers, new_project, source_answers

NET = {"inputs": SHAPES, "targets": ["cpu"], "measure": QUICK, "tune": UNTUNED}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A project that was never built, as working folder."""
    project = new_project(tmp_path / "project")
    for name, value in project.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(project.root)
    return project


def test_importing_the_package_brings_in_nothing():
    code = (
        "import sys; before = set(sys.modules); import ortprep; ortprep.__all__;"
        "print(sorted(set(sys.modules) - before - {'ortprep', '__future__'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_packages_of_the_build_their_extra_is_named():
    code = """
import sys
sys.modules["pydantic"] = None
from ortprep.errors import MissingExtraError
try:
    from ortprep import prepare
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ortprep.prepare needs pydantic, which is not installed" in done.stdout
    assert install_command("build") in done.stdout


@pytest.mark.parametrize(
    ("model", "sections", "error", "text"),
    [
        ("models/net.onnx", {"configs": "s3://b/c"}, SpecError, "expected a folder on this machine, got a"),
        ("models/net.onnx", {"inputs": "x"}, SpecError, "inputs: expected a mapping, got 'x'"),
        ("models/net.onnx", {"budget_s": 3}, SpecError, "budget_s: unknown key; expected one of name"),
        ("configs/absent.yaml", {}, SpecError, "cannot be read"),
        ("models/net.onnx", {**NET, "tunes": {}}, SpecError, "tunes: unknown key; did you mean 'tune'?"),
        ("models/absent.onnx", NET, SourceError, "no such model: models/absent.onnx"),
        ("models", NET, SourceError, "expected a URL or an ONNX file, got a folder at"),
        (Path("https://host/net.onnx"), NET, SourceError, "no such model: https:/host/net.onnx"),
        ("configs/net.yaml", {"target": "cuda"}, SpecError, "no such target in net: cuda"),
        ("models/net.onnx", {**NET, "name": "../net"}, SpecError, "name: expected up to 128"),
    ],
)
def test_what_is_wrong_is_raised_as_the_command_tells_it(place, model, sections, error, text):
    with pytest.raises(error) as caught:
        prepare(model, **sections)
    assert text in caught.value.message
    assert caught.value.hint is not None
    assert not place.artifacts.exists()


def test_each_call_asks_anew_what_the_machine_has(place):
    unavailable_reason("cpu")
    with pytest.raises(SpecError):
        prepare(place.configs / "net.yaml", target="cuda")
    assert unavailable_reason.cache_info().currsize == 0


def test_a_model_without_inputs_gets_a_spec_first(place):
    spec = place.configs / "net.yaml"
    spec.unlink()
    events = []
    for _ in range(2):
        with pytest.raises(SpecError, match="no such target in net: cuda"):
            prepare("models/net.onnx", targets=["cpu"], target="cuda", on_progress=events.append)
    assert read_spec(spec).inputs["x"].shapes
    assert read_spec(spec).targets == "auto"
    assert [(event.task, event.kind) for event in events] == [("init:net", "said")]


@dataclass
class Built:
    """A bundle that a notebook prepared, and what it saw of that."""

    project: Project
    bundle: Path
    events: list[BuildEvent] = field(default_factory=list)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A bundle of `models/net.onnx`, prepared in a thread below a running event loop, as in a notebook."""
    project = new_project(tmp_path_factory.mktemp("notebook") / "project")
    (project.configs / "net.yaml").unlink()
    events = []

    async def cell():
        return await asyncio.to_thread(prepare, "models/net.onnx", on_progress=events.append, **NET)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in project.environment().items():
            patch.setenv(name, value)
        patch.chdir(project.root)
        yield Built(project, asyncio.run(cell()), events)


@pytest.mark.slow
def test_a_bundle_answers_as_its_source(built):
    feeds = {"x": np.random.default_rng(7).random((3, 64), np.float32)}
    expected = source_answers(built.project.models / "net.onnx", feeds)["y"]
    session = load(built.bundle, check="golden")
    np.testing.assert_allclose(answers(session, feeds)["y"], expected, rtol=1e-3, atol=1e-5)
    assert built.bundle == built.project.bundle()


@pytest.mark.slow
def test_every_event_is_told_to_the_end(built):
    finished = [event.task for event in built.events if event.kind == "finished"]
    assert (len(finished), finished[0], finished[-1]) == (7, "fetch:net", "package:net")
    assert any(event.kind == "said" and event.text for event in built.events)
    assert built.events[-1] == BuildEvent("ended")


@pytest.mark.slow
def test_a_second_call_does_nothing_at_once(built, capfd):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    events = []
    started_s = time.perf_counter()
    prepare("models/net.onnx", on_progress=events.append, **NET)
    assert time.perf_counter() - started_s < 1
    assert {event.kind for event in events} == {"current", "ended"}
    assert capfd.readouterr() == ("", "")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
