"""Tasks run in order in the calling thread; the first that fails is raised, and the rest is not tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortprep.build.sequential_run import run_in_order
from ortprep.errors import StageError
from tests.build.fakes import Count, Shout, tasks


class Recorder:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def started(self, task: str) -> None:
        self.told.append(f"started {task}")

    def said(self, task: str, line: str) -> None:
        self.told.append(f"{task} said {line}")

    def progressed(self, task: str, fraction: float) -> None:
        self.told.append(f"progressed {task}")

    def finished(self, task: str) -> None:
        self.told.append(f"finished {task}")

    def current(self, task: str) -> None:
        self.told.append(f"current {task}")

    def failed(self, task: str, message: str) -> None:
        self.told.append(f"failed {task}: {message}")

    def skipped(self, task: str, message: str) -> None:
        self.told.append(f"skipped {task}: {message}")

    def ended(self) -> None:
        self.told.append("ended")


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))


def test_a_second_run_does_nothing_and_says_so(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    run_in_order(tasks(tmp_path, Shout(), Count()), first)
    run_in_order(tasks(tmp_path, Shout(), Count()), second)
    assert first.told == [
        "started shout:m",
        "shout:m said shouting hello",
        "finished shout:m",
        "started count:m/cpu",
        "finished count:m/cpu",
        "ended",
    ]
    assert second.told == ["current shout:m", "current count:m/cpu", "ended"]


def test_a_failure_is_raised_with_its_task_and_hint(tmp_path: Path) -> None:
    recorder = Recorder()
    with pytest.raises(StageError, match="shout of m: lost its voice") as caught:
        run_in_order(tasks(tmp_path, Shout(fails=True), Count()), recorder)
    assert caught.value.hint == "drink tea"
    assert recorder.told[-2:] == ["skipped count:m/cpu: shout:m failed", "ended"]
