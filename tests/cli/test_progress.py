"""How much of a running task is done, and how long the rest will take: on a terminal only."""

from __future__ import annotations

import re
from pathlib import Path

from tests.prepare.builders import Project

BUILD = """
import time
from ortprep.cli.console import BuildObserver
observer = BuildObserver()
observer.started("measure:net/cpu")
time.sleep(0.4)
observer.progressed("measure:net/cpu", 0.25)
time.sleep(0.4)
observer.progressed("measure:net/cpu", 0.5)
observer.progressed("measure:other", 0.5)
time.sleep(0.4)
observer.finished("measure:net/cpu")
observer.ended()
"""


def test_a_terminal_shows_how_much_is_done_and_how_long_the_rest_will_take(tmp_path: Path) -> None:
    code, shown = Project(tmp_path).on_terminal("-c", BUILD)
    assert code == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"[⠁-⣿] measure:net/cpu +0:00:0\d +25% +-:--:--", plain), plain
    assert re.search(r"[⠁-⣿] measure:net/cpu +0:00:0\d +50% +0:00:0\d", plain), plain
    assert "other" not in plain


def test_a_pipe_gets_lines_of_finished_tasks_only(tmp_path: Path) -> None:
    ended = Project(tmp_path).python("-c", BUILD)
    assert re.fullmatch(r"done measure:net/cpu \(\d\.\d s\)\n1 done, 0 up to date\n", ended.err), ended.err
