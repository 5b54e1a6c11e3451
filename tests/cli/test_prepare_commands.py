"""`ortprep init` and `ortprep prepare`, as a user runs them."""

import json
import signal

import pytest

from ortprep.spec.reading import OPEN_QUESTION, read_spec
from tests import builders as models
from tests.fakes import wait_for
from tests.init.builders import impossible
from tests.prepare.builders import AS_PREPARED, QUICK, Project, finish

# -- `ortprep init`, and `ortprep prepare` of a model file, as a user runs them

DEFAULTS = json.dumps({"targets": ["cpu"], "tune": AS_PREPARED, "measure": QUICK})


@pytest.fixture
def project(tmp_path):
    """A project with a model and without a spec."""
    project = Project(tmp_path)
    models.write_model(models.conv_net(), project.models / "net.onnx")
    project.configs.mkdir()
    (project.configs / "defaults.yaml").write_text(DEFAULTS)
    return project


def test_a_spec_is_written_once(project):
    (project.root / "my specs").mkdir()
    first = project.call("init", "models/net.onnx")
    assert (first.code, first.out) == (0, "configs/net.yaml\n"), first.err
    spec = project.configs / "net.yaml"
    assert read_spec(spec).inputs["image"].shapes == ((1, 3, 16, 16),)
    spec.write_text(spec.read_text() + "# mine\n")
    second = project.call("init", "models/net.onnx")
    assert second.code == 2
    assert "spec exists: net in configs" in second.err
    assert "hint: ortprep prepare net, or ortprep init models/net.onnx --force\n" in second.err
    assert spec.read_text().endswith("# mine\n")
    spec.rename(project.root / "my specs" / "net.yaml")
    elsewhere = project.call("init", "models/net.onnx", "--out", "my specs")
    assert elsewhere.code == 2
    hint = (
        "ortprep prepare net --configs 'my specs', or ortprep init models/net.onnx --out 'my specs' --force"
    )
    assert hint in elsewhere.err
    (project.root / "my specs" / "net.yaml").rename(spec)
    third = project.call("init", "models/net.onnx", "--force")
    assert third.code == 0
    assert "# mine" not in spec.read_text()


@pytest.mark.parametrize("folder", ["models/net.onnx/specs", "/proc/specs"])
def test_a_folder_that_takes_no_spec_is_refused_at_once(project, folder):
    outcome = project.call("init", "models/net.onnx", "--out", folder)
    assert outcome.code == 2
    assert f"cannot write to {folder}\n  expected a folder" in outcome.err
    assert "hint: ortprep init MODEL --out DIR" in outcome.err
    assert "running net.onnx" not in outcome.err


def test_a_model_that_does_not_run_leaves_a_marked_line_and_exit_code_2(project):
    models.write_model(impossible(), project.models / "odd.onnx")
    outcome = project.call("init", "models/odd.onnx")
    assert outcome.code == 2
    assert f"\n{OPEN_QUESTION} which shape" in (project.configs / "odd.yaml").read_text()
    assert "which shape does input x [rows, columns] take? Tried [1, 128]" in outcome.err
    for named in ("models/odd.onnx", "odd"):
        outcome = project.call("prepare", named)
        assert outcome.code == 2
        told = "odd.yaml:3: answer this question, then delete the line: which shape does input x"
        assert told in outcome.err


def test_a_model_that_fails_does_not_stop_the_others(project):
    (project.models / "broken.onnx").write_bytes(b"nothing")
    outcome = project.call("init", "models/broken.onnx", "models/net.onnx", "models/absent.onnx")
    assert (outcome.code, outcome.out) == (1, "configs/net.yaml\n")
    assert "not an ONNX model" in outcome.err
    assert "no such model: models/absent.onnx" in outcome.err


@pytest.mark.parametrize("command", ["init", "prepare"])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("https://user:secret@host/net.onnx", "machine: https://REDACTED@host/net.onnx\n  expected the path"),
        ("absent.onnx", "no such model: absent.onnx\n  expected an ONNX file, got none\n\nhint: ls ."),
        ("page.onnx", "page.onnx\n  expected a complete ONNX file, got: "),
        ("cut.onnx", "cut.onnx\n  expected a complete ONNX file, got: "),
    ],
)
def test_what_is_no_model_is_told_with_a_remedy(project, command, model, said):
    (project.root / "page.onnx").write_text("<html>")
    (project.root / "cut.onnx").write_bytes((project.models / "net.onnx").read_bytes()[:-9])
    outcome = project.call(command, model)
    assert outcome.code == 1
    assert said in outcome.err
    assert "\nhint: " in outcome.err
    assert not (project.configs / f"{model}.yaml").exists()


@pytest.mark.attack
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["init", "prepare"])
def test_a_command_that_is_asked_to_end_leaves_nothing_behind(project, command, number):
    process = project.start("-m", "ortprep", command, "models/net.onnx")
    temporary = project.root / "tmp"
    wait_for(lambda: list(temporary.glob("ortprep-*/*")), what="a temporary folder is in use")
    process.send_signal(number)
    assert finish(process).code == 128 + number
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_a_command_that_waits_for_its_end(project, number):
    code = f"""
import os, sys, types
def run():
    try:
        os.kill(os.getpid(), {number:d})
    finally:
        os.kill(os.getpid(), {number:d})
        print("went on")
sys.modules["ortprep.cli.app"] = types.SimpleNamespace(run=run)
from ortprep.__main__ import main
main()
"""
    ended = project.python("-c", code)
    assert (ended.code, ended.out) == (-number, "")


@pytest.mark.attack
def test_an_interrupt_before_there_is_a_command_ends_it_without_a_traceback(project):
    code = """
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "ortprep.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from ortprep.__main__ import main
main()
"""
    ended = project.python("-c", code)
    assert (ended.code, ended.err) == (130, "")
