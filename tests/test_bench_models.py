"""What the benchmarks measure: models of language, and ONNX's own suite of operators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx.backend.test.case.test_case import TestCase as SuiteCase

from bench.backend_case import CRASHED, DIFFERENT, EQUAL, NOT_RUN, Verdict, check_case
from bench.backend_suite import LISTED, find_surprises, run_suite
from tests.builders import zero_inputs

Build = Callable[[], onnx.ModelProto]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder for models that several tests read."""
    return tmp_path_factory.mktemp("demo")


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
