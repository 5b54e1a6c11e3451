"""Errors cross process borders whole."""

from __future__ import annotations

import inspect
import json
import pickle

import pytest

from ortprep import errors
from ortprep.runtime.pool.workers import OutputTail

ALL = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PipelineError)
]


def test_every_error_survives_pickling_and_is_found_by_its_name() -> None:
    for kind in ALL:
        back = pickle.loads(pickle.dumps(kind("what failed: x\n  expected 1, got 2", hint="run this")))
        assert type(back) is kind
        assert (back.message, back.hint, str(back)) == (
            "what failed: x\n  expected 1, got 2",
            "run this",
            "what failed: x\n  expected 1, got 2\n\nhint: run this",
        )
        assert errors.error_named(kind.__name__) is kind


@pytest.mark.parametrize("name", ["Exception", "annotations", "", "_rebuild", "os"])
def test_a_name_that_is_no_error_of_ours_gives_the_root(name: str) -> None:
    assert errors.error_named(name) is errors.PipelineError


def test_every_error_survives_as_json() -> None:
    for kind in ALL:
        error = kind("what failed", hint="run this")
        for name in kind.details:
            setattr(error, name, {int: 3, float: 1.5, tuple: ("a", "b")}.get(type(getattr(kind, name)), -9))
        back = errors.from_dict(json.loads(json.dumps(errors.to_dict(error))))
        assert type(back) is kind
        assert (back.message, back.hint, back.__dict__) == ("what failed", "run this", error.__dict__)


def test_an_error_of_another_library_arrives_as_a_refused_run() -> None:
    back = errors.from_dict(errors.to_dict(MemoryError("no more")))
    assert isinstance(back, errors.RunError)
    assert "MemoryError: no more" in str(back)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"kind": 3, "message": None, "hint": 5},
        {"kind": "WorkerDiedError", "details": {"pid": "x", "stderr": 3, "exit_code": 99}},
        {"kind": "WorkerDiedError", "details": [1]},
    ],
)
def test_nonsense_from_another_process_is_an_error_with_defaults(data: dict[str, object]) -> None:
    error = errors.from_dict(data)
    assert all(getattr(error, name) == getattr(type(error), name) for name in error.details)


@pytest.mark.attack
def test_no_message_steers_the_terminal_of_who_logs_it() -> None:
    """ONNX Runtime's errors quote names of operators, a worker's output anything."""
    hostile = "\x1b]0;evil\x07\x1b[2J\u202e\r"
    error = errors.from_dict(
        errors.to_dict(errors.RunError(f"no operator {hostile}\n  in m.onnx", hint=f"rm {hostile}"))
    )
    output = OutputTail()
    lines = [*output.add(f"{hostile}\n{hostile}".encode()), *output.lines]
    for text in (error.message, str(error), repr(error), *lines):
        assert not set(hostile) & set(text) - set("evil]0;[2J")
    assert "\n  in m.onnx" in error.message
