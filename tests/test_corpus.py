"""What fuzzing began with and found stays within the law of `bench.fuzz`."""

from __future__ import annotations

import os

import pytest

from bench.fuzz import CORPUS, TARGETS
from ortprep.bundle import onnx_wire
from ortprep.bundle.file_memory import CACHE_VARIABLE

FILES = sorted(file for file in CORPUS.glob("*/*"))


@pytest.mark.attack
@pytest.mark.parametrize("target", TARGETS)
def test_every_file_of_the_corpus_is_read_or_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, os.environ.get(CACHE_VARIABLE, ""))
    monkeypatch.setattr(onnx_wire, "SMALL_BYTES", onnx_wire.SMALL_BYTES)
    files = [file for file in FILES if file.parent.name == target]
    check = TARGETS[target]()
    assert files
    for file in files:
        check(file.read_bytes())
