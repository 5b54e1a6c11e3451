"""The command line's manners: exit codes, data on stdout, talk on stderr, hints that can be copied."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from ortprep.bundle.codec import read_json
from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import MANIFEST_FILE, read_manifest
from ortprep.children.availability import unavailable_reason
from ortprep.errors import BundleError
from ortprep.runtime import load
from tests.prepare.builders import (
    SHAPES,
    Outcome,
    Project,
    finish,
    is_intact,
    preferred_model,
    stamps,
)
from tests.runtime.builders import CPU_ONLY, UNMET, rewrite_digests, write_bundle, write_linear

WITHOUT_GPU = pytest.mark.skipif(
    unavailable_reason("cuda") is None, reason="this machine has a GPU, so that nothing is unavailable"
)


def test_show_tells_and_explains_what_the_bundle_gains_on_a_terminal_of_100(first_build):
    project, _ = first_build
    outcome = project.call("show", "net")
    assert (outcome.code, outcome.err) == (0, "")
    headings = ("cpu: level", "portable: level", "verified", "default", "ready", "init", "steady", "private")
    assert [word for word in headings if word not in outcome.out] == []
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("a ± b: the median, and half the distance") for line in lines)
    assert {"prepared: what was prepared for this target", "input x: float32 [batch, 64]"} <= set(lines)


def test_show_json_is_the_manifest(first_build):
    project, _ = first_build
    shown = json.loads(project.call("show", "net", "--json").out)
    recorded = read_json(project.bundle() / MANIFEST_FILE)
    recorded.pop("self_digest")
    shown.pop("self_digest", None)
    assert shown == recorded


def test_explain_json_lists_every_task_in_build_order(first_build):
    project, _ = first_build
    outcome = project.call("explain", "net", "--json")
    explained = json.loads(outcome.out)
    assert [item["task"].partition("/")[0] for item in explained] == [
        *("fetch", "optimize", "optimize", "verify", "verify", "measure", "package")
    ]
    assert {item["model"] for item in explained} == {"net"}
    assert outcome.err == ""


def test_the_schema_accepts_the_specs_that_build(first_build):
    project, _ = first_build
    outcome = project.call("schema")
    assert (outcome.code, outcome.err) == (0, "")
    schema = json.loads(outcome.out)
    spec = json.loads((project.configs / "net.yaml").read_text())
    jsonschema.validate(spec, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**spec, "sorce": {}}, schema)


def test_check_passes_an_intact_bundle_and_writes_no_data(first_build):
    project, _ = first_build
    outcome = project.call("check", "artifacts/net")
    assert (outcome.code, outcome.out) == (0, "")
    names = [variant.name for variant in read_loader_config(project.bundle()).variants]
    lines = [f"artifacts/net: variant {name} answers the golden sample as recorded" for name in names]
    assert outcome.err.splitlines()[1:] == lines


@pytest.mark.slow
def test_check_asks_every_variant_and_says_which_were_passed_over_and_why(tmp_path):
    project, needs = Project(tmp_path), {"cpu": UNMET, "spare": CPU_ONLY, "portable": CPU_ONLY}
    bundle = write_bundle(tmp_path / "linear", requirements=needs)
    outcome = project.call("check", "linear")
    assert (outcome.code, outcome.out) == (0, "")
    assert "linear: passed over cpu: expected ONNX Runtime >= 99.0" in outcome.err
    assert all(f"variant {name} answers the golden" in outcome.err for name in ("spare", "portable"))
    write_linear(bundle / "portable" / "linear_optimized.onnx", np.ones((8, 4), np.float32))
    rewrite_digests(bundle)
    outcome = project.call("check", "linear")
    assert outcome.code == 4
    assert "variant spare answers the golden sample as recorded" in outcome.err
    assert "error: variant 'portable' of " in outcome.err


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_check_names_what_is_not_as_it_was_written(built):
    name = preferred_model(built.bundle())
    _flip(built.bundle() / name)
    outcome = built.call("check", "artifacts/net", "--no-golden")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.startswith("error: ")
    assert Path(name).name in outcome.err


NOTHING_SUCH = {
    "an unknown model": ("prepare", "nte"),
    "an unknown target": ("prepare", "net", "--target", "tpu"),
    "a target the spec does not name": ("prepare", "net", "--target", "cuda"),
    "a folder without specs": ("prepare", "--configs", "nowhere"),
    "an unknown model to explain": ("explain", "nte"),
}


@pytest.mark.parametrize("arguments", NOTHING_SUCH.values(), ids=NOTHING_SUCH)
def test_a_wrong_use_is_told_in_the_form_of_all_errors(first_build, arguments):
    project, _ = first_build
    outcome = project.call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert re.fullmatch(r"error: .+\n(  .+\n)+\nhint: .+\n", outcome.err)


@pytest.mark.parametrize("arguments", [("prepare", "--bogus"), ("frobnicate",), ("show",)])
def test_an_argument_that_does_not_exist_is_wrong_use(first_build, arguments):
    outcome = first_build[0].call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert "Usage:" in outcome.err


def test_a_load_of_what_is_no_bundle_says_what_to_load(built, monkeypatch):
    (built.models / "other.onnx").write_bytes(b"a model")
    monkeypatch.chdir(built.root)
    by_name = "load('artifacts/net')   (ortprep's commands take the name net)"
    for path, got, hint in (
        ("net", "no such file", by_name),
        ("models/net.onnx", "a file", by_name),
        (
            "models/other.onnx",
            "a file",
            f"ortprep prepare {built.root}/models/other.onnx   then load('artifacts/other')",
        ),
        ("artifacts/net/loader.json", "a file", f"load('{built.root}/artifacts/net')"),
        ("other", "no such file", "ortprep prepare other   then load('artifacts/other')"),
    ):
        with pytest.raises(BundleError) as caught:
            load(path)
        told = f"no bundle there: {built.root / path}\n  expected a folder with loader.json, got {got}"
        assert (caught.value.message, caught.value.hint) == (told, hint)


def test_a_bundle_pins_the_onnx_runtime_that_jobs_need_and_prepare_says_so(first_build):
    project, outcome = first_build
    name = next(name for name in ("onnxruntime-gpu", "onnxruntime") if _version_of(name))
    version = _version_of(name)
    pin = f"{name}=={version}"
    need = f"ONNX Runtime {version} (onnxruntime or onnxruntime-gpu); its requirements.txt has {pin}"
    assert f"  package:net: jobs need {need}\n" in outcome.err
    lines = (project.bundle() / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [pin]
    assert "requirements.txt" in {entry.path for entry in read_manifest(project.bundle()).files}
    assert f"with {pin}\n" in project.call("show", "net").out


def _version_of(distribution):
    found = next(iter(metadata.distributions(name=distribution)), None)
    return None if found is None else found.version


def test_explain_takes_a_line_for_a_model_that_is_new_or_up_to_date(first_build, project):
    new, done = project.call("explain"), first_build[0].call("explain")
    assert new.out == "net: never done; runs fetch, optimize (2), verify (2), measure, package\n"
    assert done.out == "net: up to date, fetch, optimize (2), verify (2), measure, package\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("", "ortprep prepare"), ("artifacts/none", "ortprep prepare none"), ("a b", "ortprep prepare 'a b'")],
)
def test_the_hint_for_a_missing_bundle_can_be_run(first_build, name, hint):
    outcome = first_build[0].call("show", name)
    assert (outcome.code, outcome.err.splitlines()[-1]) == (3, f"hint: {hint}")


@WITHOUT_GPU
def test_a_named_target_this_machine_lacks_is_an_error_that_says_how_to_go_on(built):
    built.write_spec(inputs=SHAPES, targets=["cpu", "cuda"])
    before = stamps(built.artifacts)
    outcome = built.call("prepare", "net")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: target not available on this machine: cuda of net\n  cuda: ")
    assert outcome.err.endswith("\n\nhint: ortprep prepare net --target cpu\n")
    assert stamps(built.artifacts) == before


def test_the_version_is_data(first_build):
    import ortprep

    outcome = first_build[0].call("--version")
    assert outcome == Outcome(0, f"ortprep {ortprep.__version__}\n", "")


NOBODY_LISTENS = {
    "a reader that went away": ("ortprep", "exec {command} 2>&1 | :; exit ${{PIPESTATUS[0]}}"),
    "stderr closed": ("doit", "exec {command} 2>&-"),
    "a full disk": ("ortprep", "exec {command} 2>/dev/full"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shell"), NOBODY_LISTENS.values(), ids=list(NOBODY_LISTENS))
def test_a_build_that_nobody_listens_to_ends_as_any_other(built, command, shell):
    arguments = ["-m", "ortprep", "prepare"] if command == "ortprep" else built.doit_arguments("prepare")

    def prepare():
        process = subprocess.run(
            ["bash", "-c", shell.format(command=shlex.join([sys.executable, *arguments]))],
            cwd=built.root,
            env=built.environment(),
            capture_output=True,
            text=True,
            timeout=600,
        )
        return Outcome(process.returncode, process.stdout, process.stderr)

    shutil.rmtree(built.bundle())
    assert prepare() == Outcome(0, "", "")
    assert is_intact(built.bundle())
    (built.models / "net.onnx").unlink()
    # doit's own code for a task that was not tried, since another failed, is 2.
    assert prepare() == Outcome(1 if command == "ortprep" else 2, "", "")


@pytest.mark.slow
def test_a_stdout_that_cannot_show_every_character_shows_the_others(built, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    outcome = built.run("show", "net")
    assert (outcome.code, outcome.err) == (0, "")
    assert "?" in outcome.out
    assert outcome.out.isascii()


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_stops_early_is_served(first_build, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    for command in ("show", "explain"):
        process = first_build[0].start("-m", "ortprep", command, "net")
        assert process.stdout is not None
        process.stdout.close()
        assert finish(process) == Outcome(0, "", "")


@pytest.mark.parametrize("level", ["loud", "basic_format", "root"])
def test_a_log_level_that_there_is_not_is_refused(project, level):
    outcome = project.call("--log", level, "schema")
    assert (outcome.code, outcome.out) == (2, "")
    assert "expected debug, info, warning or error" in " ".join(outcome.err.split())
