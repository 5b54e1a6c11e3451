"""Demo models are real: full-size, the same each time, and their answers depend on their inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from ortprep.children.child import run_child
from ortprep.errors import SpecError
from ortprep.stages.fetch.demo.bert import build_bert
from ortprep.stages.fetch.demo.catalogue import DEMO_NAMES, check_demo_name, write_demo_model
from ortprep.stages.fetch.demo.gpt2 import build_gpt2
from ortprep.stages.fetch.demo.seeded_weights import Weight
from ortprep.stages.fetch.inspection import inspect_file

PARAMETERS = {
    "alexnet": 61.0,
    "bert-base": 109.5,
    "bilstm": 15.6,
    "densenet121": 8.1,
    "gpt2": 124.4,
    "inception-v1": 7.0,
    "inception-v2": 11.2,
    "resnet50": 25.6,
    "shufflenet": 1.4,
    "squeezenet": 1.2,
    "vgg19": 143.7,
    "zfnet512": 87.3,
}
"""In millions, of the real networks."""


ALL = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
Build = Callable[[], tuple[onnx.ModelProto, tuple[Weight, ...]]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for demo models that several tests read."""
    return tmp_path_factory.mktemp("demo")


def draw_ids(shape: tuple[int, int]) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, 10_000, shape)


def answer(
    folder: Path,
    name: str,
    ids: NDArray[np.int64],
    *,
    mask: NDArray[np.int64] | None = None,
    level: onnxruntime.GraphOptimizationLevel = ALL,
) -> NDArray[np.float32]:
    """Returns the first output of a model of language, which is made if it is not there."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        write_demo_model(name, path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids) if mask is None else mask}
    taken = [item.name for item in session.get_inputs()]
    (first,) = session.run(None, {name: feeds[name] for name in taken})
    return np.asarray(first, np.float32)


def session_of(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if PARAMETERS[name] < 16 else pytest.mark.manual)
        for name in DEMO_NAMES
    ],
)
def test_a_demo_model_is_full_size_and_answers_sensibly(tmp_path: Path, name: str) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "count"), [(build_bert, 109_482_240), (build_gpt2, 124_439_808)], ids=["bert-base", "gpt2"]
)
def test_a_transformer_has_the_weights_of_the_real_one(build: Build, count: int) -> None:
    assert sum(weight.size_bytes for weight in build()[1]) == 4 * count


@pytest.mark.parametrize(
    "name", [pytest.param("bilstm", marks=pytest.mark.slow), pytest.param("gpt2", marks=pytest.mark.manual)]
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17)])
def test_a_model_of_language_answers_the_same_with_and_without_optimisation(
    models: Path, name: str, shape: tuple[int, int]
) -> None:
    levels = (onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL, ALL)
    plain, optimised = (answer(models, name, draw_ids(shape), level=level) for level in levels)
    assert plain.std() > 0.01
    np.testing.assert_allclose(optimised, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "reaches_back"),
    [
        pytest.param("bilstm", True, marks=pytest.mark.slow),
        pytest.param("gpt2", False, marks=pytest.mark.manual),
    ],
)
def test_a_token_reaches_earlier_answers_only_if_the_model_reads_backwards(
    models: Path, name: str, reaches_back: bool
) -> None:
    ids = draw_ids((2, 9))
    changed = ids.copy()
    changed[:, -1] += 1
    before, after = (answer(models, name, tokens) for tokens in (ids, changed))
    assert np.array_equal(before[:, :-1], after[:, :-1]) is not reaches_back
    assert not np.array_equal(before[:, -1], after[:, -1])


@pytest.mark.manual
def test_gpt2_does_not_see_what_its_mask_leaves_out(models: Path) -> None:
    ids = draw_ids((1, 9))
    mask = np.ones_like(ids)
    mask[:, 3] = 0
    changed = ids.copy()
    changed[:, 3] += 1
    before, after = (answer(models, "gpt2", tokens, mask=mask) for tokens in (ids, changed))
    np.testing.assert_allclose(after[:, 4:], before[:, 4:], rtol=1e-3, atol=1e-5)


def test_the_same_demo_model_has_the_same_bytes(tmp_path: Path) -> None:
    digests = {write_demo_model("squeezenet", tmp_path / f"{i}.onnx").sha256 for i in range(2)}
    assert len(digests) == 1


@pytest.mark.manual
def test_weights_are_written_block_by_block(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    reply = run_child("ortprep.stages.fetch.demo.catalogue:write_demo", {"name": "vgg19", "path": str(path)})
    assert reply.peak_rss_bytes < path.stat().st_size / 2


@pytest.mark.parametrize(("name", "nearest"), [("resnet5", "resnet50"), ("#", "squeezenet")])
def test_an_unknown_demo_name_is_told_with_one_that_there_is(name: str, nearest: str) -> None:
    with pytest.raises(SpecError, match="expected one of alexnet, bert-base") as caught:
        check_demo_name(name)
    assert caught.value.hint == f"source: {{demo: {nearest}}}"
