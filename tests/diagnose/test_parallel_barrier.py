"""Participants of several processes wait for each other, and are released when one gives up."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.diagnose.parallel.barrier import Barrier, values_of, was_released
from pipeline.diagnose.parallel.processes import join, run_together
from pipeline.errors import ChildError, LoadError, PipelineError

HANG_S = 60


def meet(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child."""
    arrived_s = time.monotonic()
    join(request).wait("here")
    return {"arrived_s": arrived_s, "left_s": time.monotonic(), "name": request["name"]}


def meet_or_fail(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child; one of them fails before the others can go on."""
    if request["name"] == "bad":
        raise LoadError("this one is bad", hint="replace it")
    return meet(request)


def meet_or_hang(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child; one of them fails while the others keep the interpreter, as a creation may."""
    barrier = join(request)
    (Path(request["folder"]) / f"{os.getpid()}").touch()
    if request["name"] == "bad":
        while len(list(Path(request["folder"]).iterdir())) < request["participants"]:
            time.sleep(0.01)
        with barrier.kept():
            raise LoadError("this one is bad")
    ctypes.PyDLL(None).sleep(HANG_S)
    return {}


def meet_or_die(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child; one of them ends without a word."""
    if request["name"] == "bad":
        raise SystemExit(9)
    return meet(request)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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


def test_who_is_busy_is_not_waited_for_when_another_fails(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    busy = [{"name": name, "folder": str(tmp_path)} for name in ("good", "bad", "good")]
    with pytest.raises(LoadError, match="this one is bad"):
        run_together(f"{__name__}:meet_or_hang", busy, participants=3)
    assert time.monotonic() - begun_s < HANG_S / 2
    assert not any(is_running(int(file.name)) for file in tmp_path.iterdir())


def test_ctrl_c_ends_at_once_what_is_busy_and_leaves_nothing(tmp_path: Path) -> None:
    busy = [{"name": "good", "folder": str(tmp_path)}] * 2
    rose_s: list[float] = []

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        rose_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        run_together(f"{__name__}:meet_or_hang", busy, participants=2)
    assert time.monotonic() - rose_s[0] < HANG_S / 2
    interrupting.join()
    assert not any(is_running(int(file.name)) for file in tmp_path.iterdir())
    assert not any(thread.name.startswith("ortprep-process") for thread in threading.enumerate())


def test_who_comes_after_another_gave_up_goes_no_further(tmp_path: Path) -> None:
    Barrier(tmp_path, 2).give_up()
    with pytest.raises(ChildError) as caught:
        join({"barrier": str(tmp_path), "participants": 2})
    assert was_released(caught.value)


def test_places_are_apart(tmp_path: Path) -> None:
    barrier = Barrier(tmp_path, 2)
    barrier.arrive("one")
    barrier.arrive("other")
    assert not barrier.is_complete("one")
    barrier.arrive("one")
    assert barrier.is_complete("one")
    assert not barrier.is_complete("other")
    assert not barrier.is_complete("a third")


def test_a_thread_that_fails_releases_those_that_wait(tmp_path: Path) -> None:
    barrier = Barrier(tmp_path, 2)

    def fail() -> None:
        with barrier.kept():
            raise LoadError("out of memory")

    with ThreadPoolExecutor(2) as threads, pytest.raises(LoadError, match="out of memory"):
        values_of([threads.submit(barrier.wait, "here"), threads.submit(fail)])
    with pytest.raises(PipelineError):
        barrier.is_complete("later")


def test_a_block_that_does_not_fail_breaks_nothing(tmp_path: Path) -> None:
    barrier = Barrier(tmp_path, 1)
    with barrier.kept():
        barrier.wait("here")
    assert barrier.is_complete("here")
