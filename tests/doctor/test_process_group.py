"""Participants of several processes wait for each other, and are released when one gives up."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ortprep.doctor.doctor_model import plan_on
from ortprep.doctor.process_group import (
    Barrier,
    isolate,
    join,
    kill_all,
    run_in_threads,
    run_together,
)
from ortprep.errors import ChildError, LoadError
from tests.conftest import ROOT
from tests.fakes import wait_for

HANG_S = 3600


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
    join(request)
    (Path(request["folder"]) / f"{os.getpid()}").touch()
    if request["name"] == "bad":
        while len(list(Path(request["folder"]).iterdir())) < request["participants"]:
            time.sleep(0.01)
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


def wait_until_none_runs(folder: Path) -> None:
    pids = [int(file.name) for file in folder.iterdir()]
    wait_for(lambda: not any(map(is_running, pids)), what="every participant ends")


def requests(*names: str) -> list[dict[str, Any]]:
    return [{"name": name} for name in names]


@pytest.mark.slow
def test_nobody_goes_on_before_all_are_there() -> None:
    started_s, answers = run_together(meet, requests("a", "b", "c"), participants=3)
    assert [value["name"] for value in answers] == ["a", "b", "c"]
    last_s = max(value["arrived_s"] for value in answers)
    assert all(value["left_s"] >= last_s for value in answers)
    assert all(value["arrived_s"] > started_s for value in answers)


@pytest.mark.slow
@pytest.mark.parametrize("position", range(3))
def test_the_failure_of_one_is_the_failure_of_all_and_it_is_that_ones_error(position: int) -> None:
    names = ["good"] * 3
    names[position] = "bad"
    with pytest.raises(LoadError, match="this one is bad") as caught:
        run_together(meet_or_fail, requests(*names), participants=3)
    assert caught.value.hint == "replace it"


@pytest.mark.slow
def test_the_death_of_one_releases_the_others() -> None:
    with pytest.raises(ChildError, match="exit code 9"):
        run_together(meet_or_die, requests("good", "bad"), participants=2)


@pytest.mark.slow
def test_who_is_busy_is_not_waited_for_when_another_fails(tmp_path: Path) -> None:
    busy = [{"name": name, "folder": str(tmp_path)} for name in ("good", "bad", "good")]
    with pytest.raises(LoadError, match="this one is bad"):
        run_together(meet_or_hang, busy, participants=3)
    wait_until_none_runs(tmp_path)


def run_together_until_interrupted(folder: str) -> None:
    """Runs in a process of its own."""
    busy = [{"name": "good", "folder": folder}] * 2
    try:
        run_together(meet_or_hang, busy, participants=2)
    except KeyboardInterrupt:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ortprep-process")]
        raise SystemExit(f"interrupted, {len(left)} threads left") from None


@pytest.mark.slow
def test_ctrl_c_ends_at_once_what_is_busy_and_leaves_nothing(tmp_path: Path) -> None:
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


def test_who_comes_after_another_gave_up_goes_no_further(tmp_path: Path) -> None:
    kill_all(tmp_path)
    with pytest.raises(ChildError, match="another process of this measurement failed"):
        join({"barrier": str(tmp_path), "participants": 2})


def test_places_are_apart(tmp_path: Path) -> None:
    barrier = Barrier(tmp_path, 2)
    barrier.arrive("one")
    barrier.arrive("other")
    assert not barrier.is_complete("one")
    barrier.arrive("one")
    assert barrier.is_complete("one")
    assert not barrier.is_complete("other")
    assert not barrier.is_complete("a third")


def test_a_thread_that_fails_does_not_leave_its_process_waiting_for_the_others(tmp_path: Path) -> None:
    barrier = Barrier(tmp_path, 2)

    def fail() -> None:
        raise LoadError("out of memory")

    with pytest.raises(LoadError, match="out of memory"):
        run_in_threads([lambda: barrier.wait("here"), fail])
    barrier.arrive("here")  # lets the thread end
    assert run_in_threads([lambda: 1, lambda: 2]) == [1, 2]


@pytest.fixture
def no_gpu_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_plan_for_the_cpu_stays_as_it_is() -> None:
    plan = plan_on("m.onnx", "cpu")
    assert isolate(plan) == (plan, {})


def test_in_its_process_the_third_gpu_is_the_first(no_gpu_hidden: None) -> None:
    plan, environment = isolate(plan_on("m.onnx", "cuda:2", provider_options={"use_tf32": "0"}))
    assert environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert plan == plan_on("m.onnx", "cuda:0", provider_options={"use_tf32": "0"})


def test_what_is_hidden_stays_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    _, environment = isolate(plan_on("m.onnx", "cuda:1"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "7"


def say_which_gpus(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs in a child."""
    ordinals = [plan["providers"][0]["options"]["device_id"] for plan in request["plans"]]
    return {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "ordinals": ordinals}


@pytest.mark.slow
def test_a_process_with_one_plan_sees_its_gpu_alone_one_with_several_all(
    no_gpu_hidden: None,
) -> None:
    plans = [plan_on("m.onnx", "cuda:1"), plan_on("m.onnx", "cuda:2")]
    shares = [{"plans": share} for share in ([plans[0]], [plans[1]], plans)]
    _, answers = run_together(say_which_gpus, shares, participants=3)
    assert answers == [
        {"visible": "1", "ordinals": ["0"]},
        {"visible": "2", "ordinals": ["0"]},
        {"visible": None, "ordinals": ["1", "2"]},
    ]
