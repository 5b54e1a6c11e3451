"""Scratch folders are gone afterwards, wherever a signal handler raises."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ortprep.children.child import scratch_folder

pytestmark = pytest.mark.runtime


class Interrupted(BaseException):
    """What a signal handler raises."""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def use(make: Callable[[], AbstractContextManager[Any]]) -> None:
    with make() as folder:
        (Path(folder) / "file").touch()
        (Path(folder) / "sub").mkdir()


def is_interrupted(work: Callable[[], None], at: int) -> bool:
    """Does some work, and raises at a step where Python calls signal handlers; False if it has fewer."""
    steps = 0

    def count(_frame: FrameType, event: str, _: object) -> None:
        nonlocal steps
        steps += event in ("call", "c_return")
        if steps == at:
            sys.setprofile(None)
            raise Interrupted

    before = sys.getprofile()
    try:
        sys.setprofile(count)
        work()
    except (Interrupted, OSError):
        # `shutil.rmtree` turns an interruption between two of its statements into an `OSError`.
        return True
    finally:
        sys.setprofile(before)
    return False


def test_a_folder_is_yours_and_gone_afterwards(temporary):
    with scratch_folder("mine-") as folder:
        assert folder.parent == temporary
        assert folder.name.startswith("mine-")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:unclosed scandir:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_at_any_step_leaves_nothing(temporary):
    step = 1
    while is_interrupted(lambda: use(lambda: scratch_folder("mine-")), step):
        assert not list(temporary.iterdir()), f"interrupted at step {step}"
        step += 1
    assert step > 50
    assert not list(temporary.iterdir())


def test_what_is_written_during_the_removal_goes_too(temporary):
    ended = threading.Event()

    def write(folder: Path) -> None:
        for number in range(10_000):
            if ended.is_set():
                return
            (folder / str(number)).write_bytes(b"")

    with scratch_folder("mine-") as folder:
        threads = [threading.Thread(target=_ignoring_loss, args=(write, folder)) for _ in range(2)]
        for thread in threads:
            thread.start()
    ended.set()
    for thread in threads:
        thread.join()
    assert not list(temporary.iterdir())


def _ignoring_loss(write: Callable[[Path], None], folder: Path) -> None:
    try:
        write(folder)
    except FileNotFoundError:
        return
