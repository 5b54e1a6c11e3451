"""What the fuzzer found, ONNX's own suite of operators, and that every folder of tests is collected."""

import os
from fnmatch import fnmatch
from pathlib import Path

import pytest

from bench.backend_case import EQUAL
from bench.backend_suite import find_surprises, run_suite
from bench.fuzz import CORPUS, TARGETS
from ortprep.bundle import onnx_wire
from ortprep.bundle.file_memory import CACHE_VARIABLE

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


@pytest.mark.slow
def test_one_case_in_twenty_answers_as_before_after_optimize_and_reload():
    verdicts = run_suite(every=20)
    assert find_surprises(verdicts) == ()
    assert sum(verdict.outcome == EQUAL for verdict in verdicts) > len(verdicts) / 2
