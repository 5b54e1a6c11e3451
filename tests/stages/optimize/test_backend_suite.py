from __future__ import annotations

import numpy as np
import pytest
from onnx.backend.test.case.test_case import TestCase as SuiteCase

from bench.backend_case import CRASHED, DIFFERENT, EQUAL, NOT_RUN, Verdict, check_case
from bench.backend_suite import LISTED, describe_counts, find_surprises, run_suite
from tests.builders import zero_inputs

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
