"""Participants of several processes wait for each other, and are released when one gives up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.diagnose.parallel.line import Line, cause_of
from pipeline.diagnose.parallel.processes import line_of, run_together
from pipeline.errors import ChildError, LoadError, PipelineError


def meet(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child."""
    arrived_s = time.monotonic()
    line_of(request).wait("here")
    return {"arrived_s": arrived_s, "left_s": time.monotonic(), "name": request["name"]}


def meet_or_fail(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child; one of them fails before the others can go on."""
    if request["name"] == "bad":
        raise LoadError("this one is bad", hint="replace it")
    return meet(request)


def meet_or_die(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child; one of them ends without a word."""
    if request["name"] == "bad":
        raise SystemExit(9)
    return meet(request)


def requests(*names: str) -> list[dict[str, Any]]:
    return [{"name": name} for name in names]


def test_nobody_goes_on_before_all_are_there() -> None:
    answers = run_together(f"{__name__}:meet", requests("a", "b", "c"), participants=3)
    assert [value["name"] for value in answers.values] == ["a", "b", "c"]
    last_s = max(value["arrived_s"] for value in answers.values)
    assert all(value["left_s"] >= last_s for value in answers.values)
    assert all(value["arrived_s"] > answers.started_s for value in answers.values)


@pytest.mark.parametrize("position", range(3))
def test_the_failure_of_one_is_the_failure_of_all_and_it_is_that_ones_error(position: int) -> None:
    names = ["good"] * 3
    names[position] = "bad"
    with pytest.raises(LoadError, match="this one is bad") as caught:
        run_together(f"{__name__}:meet_or_fail", requests(*names), participants=3)
    assert caught.value.hint == "replace it"


def test_the_death_of_one_releases_the_others() -> None:
    with pytest.raises(ChildError, match="exit code 9"):
        run_together(f"{__name__}:meet_or_die", requests("good", "bad"), participants=2)


def test_places_are_apart(tmp_path: Path) -> None:
    line = Line(tmp_path, 2)
    line.arrive("one")
    line.arrive("other")
    assert not line.is_complete("one")
    line.arrive("one")
    assert line.is_complete("one")
    assert not line.is_complete("other")
    assert not line.is_complete("a third")


def test_a_thread_that_fails_releases_those_that_wait(tmp_path: Path) -> None:
    line = Line(tmp_path, 2)

    def fail() -> None:
        with line.kept():
            raise LoadError("out of memory")

    with ThreadPoolExecutor(2) as threads:
        waiting, failing = threads.submit(line.wait, "here"), threads.submit(fail)
        errors = [waiting.exception(), failing.exception()]
    assert str(cause_of([error for error in errors if error is not None])) == "out of memory"
    with pytest.raises(PipelineError):
        line.is_complete("later")


def test_a_block_that_does_not_fail_breaks_nothing(tmp_path: Path) -> None:
    line = Line(tmp_path, 1)
    with line.kept():
        line.wait("here")
    assert line.is_complete("here")
