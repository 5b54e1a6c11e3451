"""The tests themselves: every folder is collected, and every file of the corpus is read or refused."""

import os
from fnmatch import fnmatch
from pathlib import Path

import pytest

from bench.fuzz import CORPUS, TARGETS
from ortprep.bundle import onnx_wire
from ortprep.bundle.file_memory import CACHE_VARIABLE

# -- a plain run runs everything

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
