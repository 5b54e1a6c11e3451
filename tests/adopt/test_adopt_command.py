"""An application that makes its own sessions: adopted, prepared and run, by the commands alone."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import read_manifest
from ortprep.spec.reading import read_specs
from tests.builders import embedding, write_model
from tests.prepare.builders import QUICK, Project, folding_net

APPLICATION = """
import json, sys
from pathlib import Path
import numpy as np
import onnxruntime

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.enable_cpu_mem_arena = False
options.add_session_config_entry("session.intra_op.allow_spinning", "0")
net = onnxruntime.InferenceSession("models/net.onnx", options, providers=["CPUExecutionProvider"])
text = Path("models/words.onnx").read_bytes()
words = onnxruntime.InferenceSession(text, providers=["CPUExecutionProvider"])
answers = []
for rows in (2, 1, 2):
    image = np.linspace(-0.5, 0.25, rows * 64, dtype=np.float32).reshape(rows, 64)
    answers += net.run(None, {"x": image})
answers += words.run(None, {"ids": np.array([[1, 3, 7]]), "mask": np.ones((1, 3), np.int64)})
Path(sys.argv[1]).write_text(json.dumps([one.tolist() for one in answers]))
raise SystemExit(int(sys.argv[2]))
"""


@pytest.fixture
def project(tmp_path):
    made = Project(tmp_path / "project")
    write_model(folding_net(), made.models / "net.onnx")
    write_model(embedding(), made.models / "words.onnx")
    (made.root / "app.py").write_text(APPLICATION)
    made.configs.mkdir()
    tune = {"max_trials": 2, "budget_s": 60, "rounds": 3, "steady_s": 0.01}
    (made.configs / "defaults.yaml").write_text(json.dumps({"tune": tune, "measure": QUICK}))
    return made


@pytest.mark.slow
def test_an_application_is_adopted_prepared_and_run_with_its_own_options(project):
    program = (sys.executable, "app.py")
    outcome = project.run("adopt", "--json", "--", *program, "plain.json", "7")
    assert outcome.code == 7, outcome.err
    assert all(not model["problem"] for model in json.loads(outcome.out))
    by_file, of_bytes = sorted(read_specs(project.configs), key=lambda spec: spec.name != "net")
    own = {"intra_op_num_threads": 1, "enable_cpu_mem_arena": False}
    assert by_file.runtime.attributes == own
    assert by_file.runtime.session_config == {"session.intra_op.allow_spinning": "0"}
    assert by_file.tune.runs_per_load == 3
    image = by_file.inputs["x"]
    assert (image.shapes, image.range) == (((2, 64), (1, 64)), (-0.5, 0.25))
    ids, mask = of_bytes.inputs["ids"], of_bytes.inputs["mask"]
    assert (ids.shapes, ids.values, mask.values) == (((1, 3),), (1, 3, 7), (1,))
    assert of_bytes.runtime.attributes == {}

    prepared = project.run("prepare", "net")
    assert prepared.code == 0, prepared.err
    bundle = project.bundle("net")
    for variant in read_loader_config(bundle).variants:
        assert own.items() <= variant.session_options.attributes.items()
    tuned = next(one.tuning for one in read_manifest(bundle).variants if one.tuning is not None)
    tried = [trial.session_options for trial in tuned.trials if trial.session_options is not None]
    assert len(tried) >= 2
    assert all(own.items() <= options.attributes.items() for options in tried)

    ran = project.run("run", "--verbose", "--", *program, "run.json", "0")
    assert ran.code == 0, ran.err
    assert str(bundle) in ran.err
    plain, bundles = (json.loads((project.root / name).read_text()) for name in ("plain.json", "run.json"))
    for got, expected in zip(bundles, plain, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)

    again = project.run("adopt", "--", *program, "again.json", "0")
    assert (again.code, "left as they are" in again.err) == (0, True)


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        (["-c", "raise SystemExit(7)"], 7, "exit code 7"),
        (["-c", "pass"], 2, "created no ONNX Runtime session"),
        (["-c", "import os; os.kill(os.getpid(), 9)"], 137, "exit code 137"),
    ],
)
def test_the_exit_code_of_the_application_is_passed_on(tmp_path, program, code, said):
    project = Project(tmp_path)
    outcome = project.run("adopt", "--", sys.executable, *program)
    assert (outcome.code, outcome.out) == (code, "")
    assert said in outcome.err
    assert not project.configs.exists()


def test_runs_that_may_be_missing_are_told(tmp_path):
    project = Project(tmp_path)
    net = write_model(folding_net(), project.models / "net.onnx")
    program = f"import onnxruntime, os; onnxruntime.InferenceSession({str(net)!r}); os.remove({str(net)!r})"
    outcome = project.run("adopt", "--", sys.executable, "-c", f"{program}; os._exit(3)")
    assert (outcome.code, "ended abruptly" in outcome.err) == (3, True), outcome.err


@pytest.mark.parametrize("out", ["app.py", "app.py/configs", "/proc/configs"])
def test_the_program_is_not_run_if_specs_cannot_be_written(tmp_path, out):
    (tmp_path / "app.py").write_text("open('ran', 'w').close()")
    outcome = Project(tmp_path).run("adopt", "--out", out, "--", sys.executable, "app.py")
    assert (outcome.code, f"cannot write to {out}" in outcome.err) == (2, True), outcome.err
    assert not (tmp_path / "ran").exists()


def test_a_program_that_is_not_there_is_told(tmp_path):
    outcome = Project(tmp_path).run("adopt", "--", "no-such-program")
    assert (outcome.code, "cannot run no-such-program" in outcome.err) == (127, True)


def test_a_judged_programs_arguments_are_said_to_be_in_the_specs(tmp_path):
    auto = ("--precision", "auto", "--judge", "stdout")
    outcome = Project(tmp_path).run("adopt", *auto, "--", sys.executable, "-c", "pass")
    assert "pass secrets by environment variables" in outcome.err.replace("\n", " ")
