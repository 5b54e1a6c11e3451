"""A task runs again for whatever decides its outcome, and for nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest

from ortprep.spec.models import ModelSpec
from ortprep.stages.convert.stage import ConvertStage
from ortprep.stages.core import application_judge, provenance
from ortprep.stages.core.application_judge import judge_key
from ortprep.stages.core.contract import Plan
from ortprep.stages.measure.stage import MeasureStage
from ortprep.stages.optimize.stage import OptimizeStage
from ortprep.stages.package.stage import PackageStage
from ortprep.stages.tune.stage import TuneStage
from ortprep.stages.verify.stage import VerifyStage

OPTIMIZE, VERIFY, TUNE, MEASURE = OptimizeStage(), VerifyStage(), TuneStage(), MeasureStage()
CONVERT, PACKAGE = ConvertStage(), PackageStage()


def key(stage, *, folder=Path(), **spec):
    model = ModelSpec.model_validate({"name": "net", "source": {"path": "m"}, **spec}).located_in(folder)
    return json.dumps(stage.key(Plan(model, ("cpu",)), "cpu"), sort_keys=True)


@pytest.mark.parametrize(
    ("spec", "again"),
    [
        ({"optimize": {"level": "basic"}}, (OPTIMIZE,)),
        ({"optimize": {"timeout_s": 5}}, ()),
        ({"inputs": {"x": {"range": [0, 2]}}}, (OPTIMIZE, VERIFY)),
        ({"verify": {"rtol": 0.5}}, (VERIFY, TUNE)),
        ({"verify": {"seed": 3}}, (VERIFY,)),
        ({"runtime": {"intra_op_num_threads": 2}}, (OPTIMIZE, TUNE, MEASURE)),
        ({"runtime": {"cuda": {"use_tf32": 0}}}, ()),
        ({"tune": {"runs_per_load": 1}}, (TUNE, MEASURE)),
        ({"tune": {"max_trials": 9}}, (TUNE,)),
        ({"tune": {"timeout_s": 9}}, ()),
        ({"measure": {"rounds": 9}}, (MEASURE,)),
        ({"measure": {"steady_s": 9}}, (MEASURE,)),
        ({"measure": {"timeout_s": 9}}, ()),
    ],
    ids=lambda value: (
        str(value) if isinstance(value, dict) else "+".join(stage.name for stage in value) or "none"
    ),
)
def test_of_a_changed_spec_those_tasks_run_again_that_depend_on_it(spec, again):
    stages = (OPTIMIZE, VERIFY, TUNE, MEASURE)
    assert [stage.name for stage in stages if key(stage, **spec) != key(stage)] == [s.name for s in again]


@pytest.mark.parametrize("stage", [OPTIMIZE, VERIFY], ids=["optimize", "verify"])
def test_a_samples_bytes_are_part_of_the_key(stage, tmp_path):
    keys = []
    for value in (0.0, 1.0):
        np.savez(tmp_path / "0.npz", x=np.full(3, value))
        keys.append(key(stage, folder=tmp_path, samples="*.npz"))
    assert len({key(stage), *keys}) == 3


def test_one_version_of_two_distributions_is_not_one_tool(monkeypatch):
    keys = []
    for name, version in (("", "1.31.1"), ("-gpu", "1.31.1"), ("-gpu", "1.31.2")):
        installed = {f"onnxruntime{name}": version}
        monkeypatch.setattr(provenance, "installed_version", installed.get)
        keys.append(key(OPTIMIZE))
    assert len(set(keys)) == 3


def test_arguments_of_a_judge_are_in_keys_as_a_digest():
    keys = [json.dumps(judged_by(Path(), "app.py", argument)) for argument in ("token", "another" * 100)]
    assert keys[0] != keys[1]
    assert not any(word in "".join(keys) for word in ("token", "another"))


def judged_by(folder, *program, compare="stdout"):
    judge = {"run": ["python", *program], "folder": "..", "compare": compare}
    spec = {"name": "net", "source": {"path": "m"}, "convert": {"precision": "int8", "judge": judge}}
    return judge_key(ModelSpec.model_validate(spec).located_in(folder / "configs"))["judge"]


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("app.py", "app.py"),
        ("reader.py", "app.py"),  # beside it
        ("pages/deep/1.png", "pages/"),
        ("words.txt", "words.txt"),
        ("python", None),
        ("pages/.git/index", None),
        ("out/answers.txt", None),
        ("artifacts/net/loader.json", None),
    ],
)
def test_files_that_a_judges_arguments_name_are_in_its_key(tmp_path, file, named):
    program = ("app.py", "pages/", "words.txt", "out", ".")
    for name in ("app.py", "pages/1.png", "words.txt", "python", "configs/net.yaml", file):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    before = judged_by(tmp_path, *program, compare="out/answers.txt")
    (tmp_path / file).write_text("2")
    after = judged_by(tmp_path, *program, compare="out/answers.txt")
    assert [name for name in after["files"] if after["files"][name] != before["files"][name]] == [named] * (
        named is not None
    )
    assert {**after, "files": {}} == {**before, "files": {}}


def test_of_a_large_folder_the_first_files_are_in_a_judges_key(tmp_path, monkeypatch):
    monkeypatch.setattr(application_judge, "MAX_FOLDER_FILES", 2)
    for name in ("pages", "configs"):
        (tmp_path / name).mkdir()
    for name in "abc":
        (tmp_path / "pages" / name).write_text("1")
    first = judged_by(tmp_path, "pages")
    (tmp_path / "pages" / "c").write_text("2")
    assert judged_by(tmp_path, "pages") == first
    (tmp_path / "pages" / "b").write_text("2")
    assert judged_by(tmp_path, "pages") != first


@pytest.mark.parametrize("stage", [VERIFY, TUNE], ids=["verify", "tune"])
def test_what_an_application_is_does_not_verify_or_tune_again(stage, tmp_path):
    keys = []
    for text in ("1", "2"):
        (tmp_path / "app.py").write_text(text)
        judge = {"run": ["python", "app.py"]}
        model = {"name": "net", "source": {"path": "m"}, "convert": {"precision": "int8", "judge": judge}}
        plan = Plan(ModelSpec.model_validate(model).located_in(tmp_path), ("cpu",))
        keys.append([json.dumps(one.key(plan, "cpu-int8")) for one in (stage, CONVERT, PACKAGE)])
    assert [one == other for one, other in zip(*keys, strict=True)] == [True, False, False]
