"""What the benchmarks measure: models of language, and ONNX's own suite of operators."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.backend.test.case.test_case import TestCase as SuiteCase

from bench.backend_case import CRASHED, DIFFERENT, EQUAL, NOT_RUN, Verdict, check_case
from bench.backend_suite import LISTED, describe_counts, find_surprises, run_suite
from bench.language import write_language_model
from bench.language.bert import build_bert
from bench.language.gpt2 import build_gpt2
from tests.builders import zero_inputs

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


# -- test_backend_suite

PROBLEMS = {"c": "known"}


@pytest.mark.slow
def test_one_case_in_twenty_answers_as_before_after_optimize_and_reload():
    verdicts = run_suite(every=20)
    assert find_surprises(verdicts) == ()
    assert sum(verdict.outcome == EQUAL for verdict in verdicts) > len(verdicts) / 2


@pytest.mark.parametrize(("error", "outcome"), [(0.0, EQUAL), (0.01, NOT_RUN)])
def test_a_wrong_answer_is_noticed(tmp_path, error, outcome):
    expected = np.arange(3, dtype=np.float32) + 1 + np.float32(error)
    case = SuiteCase(
        name="zero_inputs",
        model_name="zero_inputs",
        url=None,
        model_dir=None,
        model=zero_inputs(),
        data_sets=[([], [expected])],
        kind="node",
        rtol=1e-3,
        atol=1e-7,
    )
    assert check_case(case, tmp_path).outcome == outcome


@pytest.mark.manual
def test_every_case_answers_as_before_after_optimize_and_reload():
    verdicts = run_suite()
    assert find_surprises(verdicts) == ()
    assert sum(verdict.outcome == EQUAL for verdict in verdicts) > 1000
    assert {verdict.case for verdict in verdicts} >= LISTED.keys()


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict("a", DIFFERENT, "y: outside tolerance", "all"),
        Verdict("a", CRASHED, "died of SIGSEGV"),
        Verdict("a", EQUAL, "all: cannot load", "source"),
        Verdict("c", EQUAL, "", "all"),
    ],
)
def test_what_is_wrong_or_no_longer_wrong_is_told(verdict):
    (surprise,) = find_surprises([verdict], PROBLEMS)
    assert surprise.startswith(f"{verdict.case}: ")


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict("a", EQUAL, "", "all"),
        Verdict("a", NOT_RUN, "NotImplemented"),
        Verdict("c", NOT_RUN, "NotImplemented"),
        Verdict("c", EQUAL, "all: cannot load", "source"),
        Verdict("c", CRASHED, "died of SIGSEGV"),
    ],
)
def test_what_is_equal_or_listed_or_not_run_at_all_is_no_surprise(verdict):
    assert find_surprises([verdict], PROBLEMS) == ()


def test_every_case_is_counted_once():
    verdicts = [
        Verdict("a", EQUAL, "", "all"),
        Verdict("b", NOT_RUN),
        Verdict("c", EQUAL, "", "source"),
        Verdict("d", CRASHED),
    ]
    counts = [int(line.split()[-1]) for line in describe_counts(verdicts, PROBLEMS).splitlines()]
    assert counts == [4, 1, 1, 1, 1]
