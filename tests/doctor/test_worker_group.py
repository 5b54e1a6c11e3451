"""Participants of several processes wait for each other, and are released when one gives up."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from ortprep.doctor.doctor_model import plan_on
from ortprep.doctor.worker_group import Barrier, isolate, join, run_in_threads, run_together
from ortprep.errors import ChildError, LoadError
from tests.conftest import ROOT
from tests.fakes import wait_for

HANG_S = 3600
GOOD, BAD = "good", "bad"


class Meeting(NamedTuple):
    """When a participant arrived and when it went on, by the clock of all processes."""

    name: str
    arrived_s: float
    left_s: float


def meet(name: str) -> Meeting:
    """Runs in a child."""
    arrived_s = time.monotonic()
    join().wait("here")
    return Meeting(name, arrived_s, time.monotonic())


def meet_or_fail(name: str) -> Meeting:
    """Runs in a child; one of them fails before the others can go on."""
    if name == BAD:
        raise LoadError("this one is bad", hint="replace it")
    return meet(name)


def meet_or_hang(name: str) -> None:
    """Runs in a child; one of them fails while the others keep the interpreter, as a creation may."""
    barrier, folder = join(), Path(os.environ["MEETING"])
    (folder / f"{os.getpid()}").touch()
    if name == BAD:
        while len(list(folder.iterdir())) < barrier.participants:
            time.sleep(0.01)
        raise LoadError("this one is bad")
    ctypes.PyDLL(None).sleep(HANG_S)


def meet_or_die(name: str) -> Meeting:
    """Runs in a child; one of them ends without a word."""
    if name == BAD:
        raise SystemExit(9)
    return meet(name)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_none_runs(folder: Path) -> None:
    pids = [int(file.name) for file in folder.iterdir()]
    wait_for(lambda: not any(map(is_running, pids)), what="every participant ends")


def jobs(*names: str, **variables: str) -> list[tuple[str, dict[str, str]]]:
    return [(name, variables) for name in names]


@pytest.mark.slow
def test_nobody_goes_on_before_all_are_there():
    started_s, answers = run_together(meet, jobs("a", "b", "c"), participants=3)
    assert [one.name for one in answers] == ["a", "b", "c"]
    last_s = max(one.arrived_s for one in answers)
    assert all(one.left_s >= last_s for one in answers)
    assert all(one.arrived_s > started_s for one in answers)


@pytest.mark.slow
@pytest.mark.parametrize("position", range(3))
def test_the_failure_of_one_is_the_failure_of_all_and_it_is_that_ones_error(position):
    names = [GOOD] * 3
    names[position] = BAD
    with pytest.raises(LoadError, match="this one is bad") as caught:
        run_together(meet_or_fail, jobs(*names), participants=3)
    assert caught.value.hint == "replace it"


@pytest.mark.slow
def test_the_death_of_one_releases_the_others():
    with pytest.raises(ChildError, match="exit code 9"):
        run_together(meet_or_die, jobs(GOOD, BAD), participants=2)


@pytest.mark.slow
def test_who_is_busy_is_not_waited_for_when_another_fails(tmp_path):
    with pytest.raises(LoadError, match="this one is bad"):
        run_together(meet_or_hang, jobs(GOOD, BAD, GOOD, MEETING=str(tmp_path)), participants=3)
    wait_until_none_runs(tmp_path)


def run_together_until_interrupted(folder: str) -> None:
    """Runs in a process of its own."""
    try:
        run_together(meet_or_hang, jobs(GOOD, GOOD, MEETING=folder), participants=2)
    except KeyboardInterrupt:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ortprep-process")]
        raise SystemExit(f"interrupted, {len(left)} threads left") from None


@pytest.mark.slow
def test_ctrl_c_ends_at_once_what_is_busy_and_leaves_nothing(tmp_path):
    script = f"from {__name__} import run_together_until_interrupted as run; run({str(tmp_path)!r})"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT.parent, stderr=subprocess.PIPE, text=True) as process:
        while len(list(tmp_path.iterdir())) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=HANG_S / 4)
    assert told == "interrupted, 0 threads left\n"
    wait_until_none_runs(tmp_path)


def test_who_comes_after_another_gave_up_goes_no_further(tmp_path):
    Barrier(tmp_path, 2).kill_all()
    with pytest.raises(ChildError, match="another process of this measurement failed"):
        Barrier(tmp_path, 2).join()


def test_places_are_apart(tmp_path):
    barrier = Barrier(tmp_path, 2)
    barrier.arrive("one")
    barrier.arrive("other")
    assert not barrier.is_complete("one")
    barrier.arrive("one")
    assert barrier.is_complete("one")
    assert not barrier.is_complete("other")
    assert not barrier.is_complete("a third")


def test_a_thread_that_fails_does_not_leave_its_process_waiting_for_the_others(tmp_path):
    barrier = Barrier(tmp_path, 2)

    def fail() -> None:
        raise LoadError("out of memory")

    with pytest.raises(LoadError, match="out of memory"):
        run_in_threads([lambda: barrier.wait("here"), fail])
    barrier.arrive("here")  # lets the thread end
    assert run_in_threads([lambda: 1, lambda: 2]) == [1, 2]


@pytest.fixture
def no_gpu_hidden(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_plan_for_the_cpu_stays_as_it_is():
    plan = plan_on("m.onnx", "cpu")
    assert isolate(plan) == (plan, {})


def test_in_its_process_the_third_gpu_is_the_first(no_gpu_hidden):
    plan, environment = isolate(plan_on("m.onnx", "cuda:2", provider_options={"use_tf32": "0"}))
    assert environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert plan == plan_on("m.onnx", "cuda:0", provider_options={"use_tf32": "0"})


def test_what_is_hidden_stays_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    _, environment = isolate(plan_on("m.onnx", "cuda:1"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "7"
