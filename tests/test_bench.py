"""What the fuzzer found, ONNX's own suite of operators, and that every folder of tests is collected."""

import os
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from onnx.backend.test.case.test_case import TestCase as SuiteCase

from bench.backend_case import CRASHED, DIFFERENT, EQUAL, NOT_RUN, Verdict, check_case
from bench.backend_suite import LISTED, find_surprises, run_suite
from bench.fuzz import CORPUS, TARGETS
from ortprep.bundle import onnx_wire
from ortprep.bundle.file_memory import CACHE_VARIABLE
from tests.builders import zero_inputs

TESTS = Path(__file__).parent


def test_no_folder_of_tests_has_a_name_that_pytest_passes_over(pytestconfig):
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    passed_over = [folder for folder in folders for part in folder.parts if _matches(part, patterns)]
    assert passed_over == []


def _matches(name, patterns):
    return any(fnmatch(name, pattern) for pattern in patterns)


# -- what fuzzing began with and found stays within the law of `bench.fuzz`

FILES = sorted(file for file in CORPUS.glob("*/*"))


@pytest.mark.attack
@pytest.mark.parametrize("target", TARGETS)
def test_every_file_of_the_corpus_is_read_or_refused(target, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, os.environ.get(CACHE_VARIABLE, ""))
    monkeypatch.setattr(onnx_wire, "SMALL_BYTES", onnx_wire.SMALL_BYTES)
    files = [file for file in FILES if file.parent.name == target]
    check = TARGETS[target]()
    assert files
    for file in files:
        check(file.read_bytes())


# -- ONNX's own suite of operators


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
