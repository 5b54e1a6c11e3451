"""Builds on terminals, in pipes, with other people's files about."""

import json
import re

import pytest

from tests.builders import write_external_model
from tests.prepare.builders import ALL_TASKS, SHAPES, Project, done, folding_net, stamps

# -- on a terminal there is something to see; what is written is the same, and the build ends


@pytest.mark.slow
def test_a_build_on_a_terminal_shows_what_runs_ends_and_tells_a_failure_once(project):
    code, written = project.on_terminal("-m", "ortprep", "prepare", "net")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert code == 0, shown
    assert re.search(r"[⠁-⣿] [a-z]+:net", shown), "nothing was shown while a task ran"
    assert "done package:net" in shown
    assert re.search(r"measure:net/cpu +0:\d\d:\d\d +\d+% +0:\d\d:\d\d", shown)
    assert "7 done, 0 up to date" in shown
    project.write_spec(source={"path": "missing.onnx"})
    code, written = project.on_terminal("-m", "ortprep", "prepare", "net")
    assert code != 0
    assert written.count("FAILED fetch:net") == 1
    assert written.count("Traceback") == 0


# -- what the build's own process is, and what it keeps to itself


PREPARE = """
import json, sys
from ortprep.cli.app import run

sys.argv = ["ortprep", "--log", "debug", "prepare"]
code = run()
peak_kb = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"code": code, "modules": sorted(sys.modules), "peak_mb": peak_kb / 1024}))
"""


@pytest.mark.slow
def test_the_builds_process_stays_small_and_never_imports_what_reads_models(tmp_path):
    project = Project(tmp_path / "project")
    write_external_model(folding_net(), tmp_path / "shipped" / "net.onnx")
    project.write_spec(inputs=SHAPES, source={"path": str(tmp_path / "shipped" / "net.onnx")})
    outcome = project.python("-c", PREPARE)
    process = json.loads(outcome.out)
    assert process["code"] == 0, outcome.err
    assert done(outcome) == ALL_TASKS
    assert {"onnx", "onnxruntime", "google.protobuf", "torch"} & set(process["modules"]) == set()
    assert process["peak_mb"] < 300


# -- the same build through doit: its tasks, its listing, its clean, and several models at once


@pytest.mark.slow
def test_clean_shows_what_it_would_do_and_removes_all_but_what_doit_did_not_make(built):
    own = built.artifacts / "README.md"
    own.write_text("mine")
    before = stamps(built.artifacts)
    shown = built.doit("clean", "-n")
    assert "prepare:net - executing 'Python: function remove_outcomes'" in shown.out
    assert stamps(built.artifacts) == before
    assert built.doit("clean", "optimize:net/portable").code == 0
    assert built.explain()["optimize/portable"] == ["never done"]
    assert "fetch" not in built.explain()
    (built.work() / "optimize-cpu-int8").mkdir()  # a spec before this one had such a variant
    (built.work() / "optimize-cpu-int8" / "net.onnx").touch()
    assert built.doit("clean").code == 0
    assert not built.bundle().exists()
    assert set(built.explain()) == {task.replace(":net", "") for task in ALL_TASKS}
    assert [path for path in built.work().rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    assert own.read_text() == "mine"
    assert (built.models / "net.onnx").exists()


def test_a_users_own_folder_in_a_bundles_place_is_neither_built_over_nor_cleaned(project):
    project.bundle().mkdir(parents=True)
    (project.bundle() / "model.onnx").write_text("precious")
    before = stamps(project.artifacts)
    built, cleaned = project.call("prepare"), project.doit("clean", "prepare:net")
    assert (built.code, built.out) == (2, "")
    for outcome in (built, cleaned):
        assert (
            "  net: a bundle would replace something that is not a bundle\n    expected nothing"
            in outcome.err
        )
    assert cleaned.code != 0
    assert stamps(project.artifacts) == before
