"""Every command, run as a user runs it, on a real model with a search of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import typer

from ortprep import versions
from ortprep.cli import app as _app  # noqa: F401  puts the commands on the app
from ortprep.cli.command import app
from ortprep.errors import MissingExtraError
from ortprep.runtime.loading.session import import_onnxruntime
from ortprep.versions import hint_to_install
from tests.prepare.builders import REPOSITORY, Outcome, Project, new_squeezenet
from tests.registry.builders import write_bundle, write_keys

TUNE = {"max_trials": 3, "budget_s": 60, "rounds": 3, "steady_s": 0.01}
APPLICATION = """\
import sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
print([one.shape for one in session.run(None, {"data_0": numpy.ones((1, 3, 224, 224), "f4")})])
"""


@dataclass(frozen=True)
class Command:
    """A command, and one thing that is true of what it does.

    Attributes:
        line: As the user types it.
        is_true: Takes how it ended and the project.
    """

    line: str
    is_true: Callable[[Outcome, Project], bool]


def _json(outcome):
    return json.loads(outcome.out)


COMMANDS = (
    Command(
        "ortprep init models/squeezenet.onnx --out specs",
        lambda _, project: (project.root / "specs" / "squeezenet.yaml").is_file(),
    ),
    Command("ortprep explain squeezenet", lambda o, _: "tune" in o.out and "never done" in o.out),
    Command("doit tune:squeezenet/cpu", lambda o, _: "done tune:squeezenet/cpu" in o.err),
    Command("doit prepare:squeezenet", lambda o, _: "done package:squeezenet" in o.err),
    Command("doit prepare", lambda o, _: o.err.startswith("0 done, ")),
    Command("ortprep prepare squeezenet", lambda o, _: o.err.startswith("0 done, ")),
    Command("ortprep show squeezenet", lambda o, _: "tuned: 3 plans tried" in o.out),
    Command(
        "ortprep show squeezenet --json",
        lambda o, _: _have_figures(_json(o)["variants"][0]["tuning"]["trials"], count=3),
    ),
    Command(
        "ortprep check artifacts/squeezenet", lambda o, _: "answers the golden sample as recorded" in o.err
    ),
    Command("ortprep host --stop", lambda o, _: "no host runs" in o.err),
    Command(
        f"ortprep adopt --out adopted -- {sys.executable} app.py models/squeezenet.onnx",
        lambda _, project: (project.root / "adopted" / "squeezenet.yaml").is_file(),
    ),
    Command(
        f"ortprep run --verbose -- {sys.executable} app.py models/squeezenet.onnx",
        lambda o, _: "(1, 1000" in o.out and "artifacts/squeezenet" in o.err,
    ),
    Command("ortprep place squeezenet --devices cpu", lambda o, _: "squeezenet (" in o.out),
    Command("ortprep serve-config squeezenet", lambda o, _: "ray_inference.deployment:build_app" in o.out),
    Command(
        "ortprep publish squeezenet --registry registry --label v1 --sign keys/key.pem",
        lambda o, _: o.out.startswith("squeezenet@sha256:"),
    ),
    Command(
        "ortprep promote squeezenet@v1 production --registry registry",
        lambda o, _: "squeezenet@production: v1" in o.out,
    ),
    Command(
        "ortprep pull squeezenet@production --registry registry --out pulled",
        lambda _, project: (project.root / "pulled/loader.json").is_file(),
    ),
    Command("ortprep verify pulled --key keys/key.pub", lambda o, _: "pulled" in o.out + o.err),
    Command("ortprep publish artifacts/other --registry registry --label o1", lambda o, _: "other@" in o.out),
    Command("ortprep publish artifacts/another --registry registry --label o2", lambda o, _: "@o2" in o.err),
    *(
        Command(f"ortprep promote other@{label} live --registry registry --force", _moved)
        for label, _moved in (("o1", lambda o, _: "o1" in o.out), ("o2", lambda o, _: "o2" in o.out))
    ),
    Command("ortprep rollback other live --registry registry", lambda o, _: "other@live: o1" in o.out),
    Command("ortprep list --registry registry", lambda o, _: "squeezenet" in o.out and "other" in o.out),
    Command("ortprep versions squeezenet --registry registry", lambda o, _: "v1" in o.out),
    Command("ortprep gc --registry registry", lambda o, _: "nothing was removed" in o.err + o.out),
    Command(
        "ortprep export triton squeezenet --out triton",
        lambda _, project: (project.root / "triton/squeezenet/config.pbtxt").is_file(),
    ),
    Command("ortprep show squeezenet --all", lambda o, _: "every trial" in o.out),
    Command(
        "ortprep compare squeezenet artifacts/squeezenet", lambda o, _: "within the limit" in o.out + o.err
    ),
    Command("ortprep schema", lambda o, _: _json(o)["type"] == "object"),
    Command(
        "ortprep doctor init models/squeezenet.onnx --shape data_0=1,3,224,224 --rounds 1",
        lambda o, _: "parse the model file" in o.out,
    ),
    Command("doit clean", lambda _, project: not project.bundle("squeezenet").exists()),
)


def _have_figures(trials, *, count):
    """Says whether so many trials have samples of each figure of a process."""
    figures = [trial["figures"] for trial in trials]
    sampled = [one[name]["values"] for one in figures for name in ("ready_ms", "steady_ms", "private_mb")]
    return len(figures) == count and all(sampled)


def test_commands_of_the_app_are_all_here_and_in_the_reference():
    lines = [f"{command.line} " for command in COMMANDS]
    names = list(_leaves(typer.main.get_command(app), "ortprep"))
    assert [name for name in names if not any(line.startswith(f"{name} ") for line in lines)] == []
    page = (REPOSITORY / "docs" / "commands.md").read_text()
    assert [
        name for name in names if f"`{name}" not in page and f"`{name.removeprefix('ortprep ')} " not in page
    ] == []


def _leaves(command, name):
    """Yields every command below a group, as a user types it."""
    below = getattr(command, "commands", {})
    for word, one in below.items():
        yield from _leaves(one, f"{name} {word}")
    if not below:
        yield name


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A spec and its model, never built; two bundles of another model, and keys to sign with."""
    root = tmp_path_factory.mktemp("commands") / "project"
    made = new_squeezenet(root, tune=TUNE)
    (made.root / "app.py").write_text(APPLICATION)
    write_bundle(made.artifacts / "other", name="other", spec=b"1")
    write_bundle(made.artifacts / "another", name="other", spec=b"2")
    write_keys(made.root / "keys")
    return made


@pytest.fixture(scope="module")
def outcomes(project):
    """How the commands ended that were run so far."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=[command.line for command in COMMANDS])
def test_a_command_does_what_it_says(project, outcomes, command):
    # In order: each works on what those before it left, as a user's do.
    position = COMMANDS.index(command)
    for earlier in COMMANDS[:position]:
        if earlier.line not in outcomes:
            outcomes[earlier.line] = _run(project, earlier.line)
    outcome = outcomes[command.line] = _run(project, command.line)
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err
    assert command.is_true(outcome, project), (outcome.out, outcome.err)


def _run(project, line):
    program, *arguments = line.split()
    return project.doit(*arguments) if program == "doit" else project.run(*arguments)


# -- commands whose dependencies are not installed

WITHOUT = """\
import sys
sys.modules[{module!r}] = None  # importing it fails as where it is not installed
sys.argv = ["ortprep", *{arguments!r}]
from ortprep.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("yaml", ["prepare"], "build"),
        ("yaml", ["doctor", "init", __file__], "build"),
        ("fsspec", ["list", "--registry", "/nowhere"], "registry"),
    ],
)
def test_a_command_without_its_dependency_names_the_extra(tmp_path, module, arguments, extra):
    write_bundle(tmp_path / "artifacts" / "net")
    ended = Project(tmp_path).python("-c", WITHOUT.format(module=module, arguments=arguments))
    assert ended.code == 1
    assert ended.err.startswith("error: ")
    assert f"pip install -e '{REPOSITORY}[{extra}]'" in ended.err


def test_the_doctor_needs_none_of_the_build_s(tmp_path):
    ended = Project(tmp_path).python("-c", WITHOUT.format(module="doit", arguments=["doctor", "env"]))
    assert ended.code in (0, 1)
    assert ended.out.startswith("ONNX Runtime")


# -- what to install where ONNX Runtime, or what a command needs, is missing: never a second wheel of it

CPU, GPU = "onnxruntime", "onnxruntime-gpu"
BARE = """\
import sys
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
from ortprep.__main__ import main; main()
"""
IMPORTING = {
    (): "pip install -e 'ROOT[gpu]'",
    (CPU,): f"pip install --force-reinstall --no-deps {CPU}==1.31.1",
    (GPU,): f"pip install --force-reinstall --no-deps {GPU}==1.31.1",
    (GPU, CPU): f"pip uninstall -y {GPU} {CPU} && pip install -e 'ROOT[gpu]'",
}
FOR_CUDA = {
    (): "pip install -e 'ROOT[cuda]'",
    (CPU,): f"pip uninstall -y {CPU} && pip install -e 'ROOT[cuda]'",
    (GPU,): "pip install -e 'ROOT[cuda]'",
}


@pytest.mark.parametrize("wheels", IMPORTING, ids=str)
def test_the_hint_fits_the_wheel_that_is_installed(monkeypatch, wheels):
    monkeypatch.setattr(versions, "_installed", lambda: dict.fromkeys(wheels, "1.31.1"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError) as caught:
        import_onnxruntime()
    hints = {caught.value.hint: IMPORTING[wheels]}
    if wheels in FOR_CUDA:
        hints[hint_to_install("cuda")] = FOR_CUDA[wheels]
    assert [hint.replace(str(REPOSITORY), "ROOT") for hint in hints if hint] == list(hints.values())


def test_a_command_on_a_bare_python_says_what_to_install():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "pipeline")}
    command = [sys.executable, "-S", "-c", BARE]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1] == f"hint: pip install -e '{REPOSITORY}[build,gpu]'"
