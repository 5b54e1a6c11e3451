"""Errors cross process borders whole."""

from __future__ import annotations

import inspect
import pickle

import pytest

from pipeline import errors

ALL = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PipelineError)
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_survives_pickling(kind: type[errors.PipelineError]) -> None:
    back = pickle.loads(pickle.dumps(kind("what failed: x\n  expected 1, got 2", hint="run this")))
    assert type(back) is kind
    assert (back.message, back.hint, str(back)) == (
        "what failed: x\n  expected 1, got 2",
        "run this",
        "what failed: x\n  expected 1, got 2\n\nhint: run this",
    )


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_found_by_its_name(kind: type[errors.PipelineError]) -> None:
    assert errors.error_named(kind.__name__) is kind


@pytest.mark.parametrize("name", ["Exception", "annotations", "", "_rebuild", "os"])
def test_a_name_that_is_no_error_of_ours_gives_the_root(name: str) -> None:
    assert errors.error_named(name) is errors.PipelineError
