"""The command line's manners: exit codes, data on stdout, talk on stderr, hints that can be copied."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from ortprep.bundle.codec import read_json
from ortprep.bundle.manifest import MANIFEST_FILE, read_manifest
from tests.prepare.builders import Outcome, Project, is_intact, preferred_model
from tests.runtime.builders import CPU_ONLY, UNMET, rewrite_digests, write_bundle, write_linear


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
    "a folder without specs": ("prepare", "--configs", "nowhere"),
}


@pytest.mark.parametrize("arguments", NOTHING_SUCH.values(), ids=NOTHING_SUCH)
def test_a_wrong_use_is_told_in_the_form_of_all_errors(first_build, arguments):
    project, _ = first_build
    outcome = project.call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert re.fullmatch(r"error: .+\n(  .+\n)+\nhint: .+\n", outcome.err)


def test_a_bundle_pins_the_onnx_runtime_that_its_jobs_need(first_build):
    project, _ = first_build
    lines = (project.bundle() / "requirements.txt").read_text().splitlines()
    ((name, version),) = (line.split("==") for line in lines if not line.startswith("#"))
    assert name in ("onnxruntime", "onnxruntime-gpu")
    assert version == metadata.version(name)
    assert "requirements.txt" in {entry.path for entry in read_manifest(project.bundle()).files}


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
