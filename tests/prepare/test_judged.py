"""int8 where it is faster, judged by what an application answers: by the commands that a user types."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.tensors.arrays import read_tensors, write_tensors
from ortprep.stages.optimize.requirements import find_integer_type
from tests.builders import matmul_net, write_model
from tests.prepare.builders import QUICK, UNTUNED, Project

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_integer_type(read_hardware(gpus=False)) is None, reason="int8 needs VNNI or AMX on x86"
    ),
]

APPLICATION = """
import sys
import numpy as np
import onnxruntime

net = onnxruntime.InferenceSession("models/net.onnx", providers=["CPUExecutionProvider"])
for seed in range(4):
    x = np.random.default_rng(seed).normal(size=(64, 1024)).astype(np.float32)
    (y,) = net.run(None, {"x": x})
    print(y.tobytes().hex() if sys.argv[1] == "exact" else int(y.mean(axis=0).argmax()))
"""


@pytest.fixture
def project(tmp_path):
    made = Project(tmp_path / "project")
    write_model(matmul_net(size=1024, layers=4), made.models / "net.onnx")
    (made.root / "app.py").write_text(APPLICATION)
    made.configs.mkdir()
    (made.configs / "defaults.yaml").write_text(json.dumps({"tune": UNTUNED, "measure": QUICK}))
    return made


def adopt(project: Project, *arguments: str) -> None:
    judged = ("--precision", "auto", "--judge", "stdout", "--record-inputs", "4")
    outcome = project.run("adopt", *judged, "--", sys.executable, "app.py", *arguments)
    assert outcome.code == 0, outcome.err
    assert "they may be private; no bundle and no registry gets them" in outcome.err.replace("\n", " ")


def change_spec(project: Project, **convert: Any) -> None:
    spec = project.configs / "net.yaml"
    lines = [line for line in spec.read_text().splitlines() if not line.startswith("convert: ")]
    spec.write_text("\n".join([*lines, f"convert: {json.dumps(convert)}", ""]))


def test_an_application_gets_int8_that_it_judged_until_that_is_switched_off(project):
    adopt(project, "rounded")
    samples = sorted((project.configs / "samples" / "net").iterdir())
    assert [oct(path.stat().st_mode & 0o777) for path in samples] == ["0o600"] * 4
    outcome = project.run("prepare")
    assert outcome.code == 0, outcome.err

    assert read_loader_config(project.bundle()).variants[0].judged
    record = next(one for one in read_manifest(project.bundle()).variants if one.name == "cpu-int8")
    conversion = record.conversion
    assert conversion is not None
    assert conversion.calibration is not None
    assert conversion.judged_on is not None
    assert (conversion.calibration.count, conversion.judged_on.count) == (2, 2)
    assert conversion.verdict is not None
    assert (conversion.verdict.equal, conversion.verdict.lines) == (4, 4)
    assert "4 of 4 lines of stdout the same" in project.run("show", "net").out.replace("\n", " ")

    command = ("run", "--verbose", "--", sys.executable, "app.py", "rounded")
    assert "variant cpu-int8" in project.run(*command).err
    switched_off = {**project.environment(), "ORTPREP_PRECISION": "fp32"}
    assert "cpu-int8" not in project.run(*command, env=switched_off).err


def test_no_real_input_is_in_a_bundle(project):
    adopt(project, "rounded")
    assert project.run("prepare").code == 0
    kept = {
        row.tobytes()
        for path in (project.configs / "samples" / "net").iterdir()
        for row in read_tensors(path)["x"]
    }
    content = b"".join(path.read_bytes() for path in project.bundle().rglob("*") if path.is_file())
    assert len(kept) == 4 * 64
    assert not any(row in content for row in kept)


def test_what_the_application_refuses_is_left_out_and_fp32_ships(project):
    adopt(project, "exact")
    judge = {"run": [sys.executable, "app.py", "exact"], "folder": ".."}
    change_spec(project, precision="auto", judge=judge, search={"max_trials": 0})
    outcome = project.run("prepare")
    assert outcome.code == 0, outcome.err
    manifest = read_manifest(project.bundle())
    (left_out,) = manifest.left_out
    assert left_out.variant == "cpu-int8"
    assert "0 of 4 lines of stdout the same, expected at least 1" in left_out.reason
    assert "cpu-int8" not in [variant.name for variant in manifest.variants]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import random; print(random.random())", "not stable from run to run"),
        ("raise ValueError('no pages')", "ValueError: no pages"),
        ("import time; time.sleep(600)", "took longer than 3 s"),
    ],
)
def test_a_judge_without_an_answer_fails_the_build_and_leaves_the_last_bundle(project, program, message):
    adopt(project, "rounded")
    change_spec(project)
    assert project.run("prepare").code == 0
    before = (project.bundle() / "loader.json").read_bytes()
    change_spec(project, precision="auto", judge={"run": [sys.executable, "-c", program], "timeout_s": 3})
    outcome = project.run("prepare")
    assert outcome.code != 0
    assert message in outcome.err
    assert (project.bundle() / "loader.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nan", "expected numbers, got nan"),
        ("shape", "expected float32"),
        ("few", "expected at least 2 real inputs"),
    ],
)
def test_samples_that_cannot_calibrate_are_an_error(project, change, message):
    adopt(project, "rounded")
    first, *rest = sorted((project.configs / "samples" / "net").iterdir())
    arrays = {"x": read_tensors(first)["x"].copy()}
    if change == "nan":
        arrays["x"][3, 5] = np.nan
    elif change == "shape":
        arrays["x"] = arrays["x"][:, :100]
    else:
        for path in rest:
            path.unlink()
    write_tensors(first, arrays)
    outcome = project.run("prepare")
    assert outcome.code != 0
    assert message in outcome.err.replace("\n", " ")
    assert not project.bundle().exists()
