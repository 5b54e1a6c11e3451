"""A task runs again for whatever decides its outcome, and for nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortprep.spec.models import ModelSpec
from ortprep.stages.core import provenance
from ortprep.stages.core.accuracy import gate_key
from ortprep.stages.core.contract import Plan, Stage
from ortprep.stages.measure.stage import MeasureStage
from ortprep.stages.optimize.stage import OptimizeStage
from ortprep.stages.tune.stage import TuneStage
from ortprep.stages.verify.stage import VerifyStage

OPTIMIZE, VERIFY, TUNE, MEASURE = OptimizeStage(), VerifyStage(), TuneStage(), MeasureStage()


def key(stage: Stage, *, folder: Path = Path(), **spec: Any) -> str:
    model = ModelSpec.model_validate({"name": "net", "source": {"path": "m"}, **spec}).located_in(folder)
    return json.dumps(stage.key(Plan(model, ("cpu",), {}), "cpu"), sort_keys=True)


@pytest.mark.parametrize(
    ("spec", "again"),
    [
        ({"optimize": {"level": "basic"}}, (OPTIMIZE,)),
        ({"optimize": {"disabled_optimizers": ["ConvAddFusion"]}}, (OPTIMIZE, TUNE)),
        ({"optimize": {"timeout_s": 5}}, ()),
        ({"inputs": {"x": {"range": [0, 2]}}}, (OPTIMIZE, VERIFY)),
        ({"verify": {"rtol": 0.5}}, (VERIFY, TUNE)),
        ({"verify": {"seed": 3}}, (VERIFY,)),
        ({"runtime": {"intra_op_num_threads": 2}}, (OPTIMIZE, TUNE, MEASURE)),
        ({"runtime": {"cuda": {"use_tf32": 0}}}, ()),
        ({"tune": {"runs_per_load": 1}}, (TUNE, MEASURE)),
        ({"tune": {"space": {"form": ["ort"]}}}, (TUNE,)),
        ({"tune": {"timeout_s": 9}}, ()),
        ({"measure": {"rounds": 9}}, (MEASURE,)),
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
    keys = []
    for argument in ("token", "another"):
        judge = {"run": ["app.py", argument]}
        spec = {"name": "net", "source": {"path": "m"}, "convert": {"precision": "int8", "judge": judge}}
        keys.append(json.dumps(gate_key(ModelSpec.model_validate(spec))))
    assert keys[0] != keys[1]
    assert not any(word in "".join(keys) for word in ("token", "another"))
