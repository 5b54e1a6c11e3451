"""The benchmarks' models of language are full-size, and answer as such models do."""

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest

from bench.language import write_language_model
from bench.language.bert import build_bert
from bench.language.gpt2 import build_gpt2

ALL = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
Build = Callable[[], onnx.ModelProto]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder for models that several tests read."""
    return tmp_path_factory.mktemp("demo")


def draw_ids(shape):
    return np.random.default_rng(0).integers(0, 10_000, shape)


def answer(folder, name, ids, *, mask=None, level=ALL):
    """Returns the first output of a model of language, which is written if it is not there."""
    path = write_language_model(name, folder / f"{name}.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids) if mask is None else mask}
    taken = [item.name for item in session.get_inputs()]
    (first,) = session.run(None, {name: feeds[name] for name in taken})
    return np.asarray(first, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "count"), [(build_bert, 109_482_240), (build_gpt2, 124_439_808)], ids=["bert-base", "gpt2"]
)
def test_a_transformer_has_the_weights_of_the_real_one(build, count):
    weights = [
        tensor for tensor in build().graph.initializer if ".weight" in tensor.name or ".bias" in tensor.name
    ]
    assert sum(math.prod(weight.dims) for weight in weights) == count


@pytest.mark.parametrize(
    "name", [pytest.param("bilstm", marks=pytest.mark.slow), pytest.param("gpt2", marks=pytest.mark.manual)]
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17)])
def test_a_model_of_language_answers_the_same_with_and_without_optimisation(models, name, shape):
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
def test_a_token_reaches_earlier_answers_only_if_the_model_reads_backwards(models, name, reaches_back):
    ids = draw_ids((2, 9))
    changed = ids.copy()
    changed[:, -1] += 1
    before, after = (answer(models, name, tokens) for tokens in (ids, changed))
    assert np.array_equal(before[:, :-1], after[:, :-1]) is not reaches_back
    assert not np.array_equal(before[:, -1], after[:, -1])


@pytest.mark.manual
def test_gpt2_does_not_see_what_its_mask_leaves_out(models):
    ids = draw_ids((1, 9))
    mask = np.ones_like(ids)
    mask[:, 3] = 0
    changed = ids.copy()
    changed[:, 3] += 1
    before, after = (answer(models, "gpt2", tokens, mask=mask) for tokens in (ids, changed))
    np.testing.assert_allclose(after[:, 4:], before[:, 4:], rtol=1e-3, atol=1e-5)
