"""Demo models are real: full-size, the same each time, and their answers depend on their inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from ortprep.errors import SpecError
from ortprep.stages.fetch.demo import DEMO_NAMES, check_demo_name, write_demo_model
from ortprep.stages.fetch.inspection import inspect_file

PARAMETERS = {
    "alexnet": 61.0,
    "densenet121": 8.1,
    "inception-v1": 7.0,
    "inception-v2": 11.2,
    "resnet50": 25.6,
    "shufflenet": 1.4,
    "squeezenet": 1.2,
    "vgg19": 143.7,
    "zfnet512": 87.3,
}
"""In millions, of the real networks."""


def session_of(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if PARAMETERS[name] < 16 else pytest.mark.manual)
        for name in DEMO_NAMES
    ],
)
def test_a_demo_model_is_full_size_and_answers_sensibly(tmp_path, name):
    path = tmp_path / "m.onnx"
    write_demo_model(name, path)
    onnx.checker.check_model(str(path), full_check=True)
    found = inspect_file(path, name=name)
    assert found.initializer_bytes / 4e6 == pytest.approx(PARAMETERS[name], rel=0.03)
    assert "ConstantOfShape" not in found.operators
    session = session_of(path)
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(2):
        feeds = {}
        for item in found.interface.inputs:
            shape = [axis if isinstance(axis, int) else 8 for axis in item.shape or ()]
            bound = found.interface.index_bounds.get(item.name, 2)
            whole = rng.integers(0, bound, shape)
            feeds[item.name] = rng.random(shape, np.float32) if item.dtype == "float32" else whole
        answers.append(session.run(None, feeds)[0])
    first, second = answers
    assert np.isfinite(first).all()
    assert np.abs(first - second).max() > 1e-6
    if session.get_outputs()[0].name.startswith(("prob", "gpu_0/softmax", "softmax")):
        # Neither all classes alike nor one of them certain.
        assert 2e-3 < first.max() < 0.9


def test_the_same_demo_model_has_the_same_bytes(tmp_path):
    digests = {write_demo_model("squeezenet", tmp_path / f"{i}.onnx").sha256 for i in range(2)}
    assert len(digests) == 1


@pytest.mark.parametrize(("name", "nearest"), [("resnet5", "resnet50"), ("#", "alexnet")])
def test_an_unknown_demo_name_is_told_with_one_that_there_is(name, nearest):
    with pytest.raises(SpecError, match="unknown demo model") as caught:
        check_demo_name(name)
    assert caught.value.hint == f"source: {{demo: {nearest}}}"
