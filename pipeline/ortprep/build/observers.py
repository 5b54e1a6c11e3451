"""Takers of the events of a build. Needs nothing that only a build needs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol


class Observer(Protocol):
    """Takes the events of a build. `task` is `STAGE:MODEL` or `STAGE:MODEL/VARIANT`."""

    def started(self, task: str) -> None:
        """A task begins."""

    def said(self, task: str, line: str) -> None:
        """A running task has something to say; may be called in another process than the other events."""

    def progressed(self, task: str, fraction: float) -> None:
        """A running task has done a fraction of its work, from 0 to 1; not every task or engine says so."""

    def finished(self, task: str) -> None:
        """A task was done."""

    def current(self, task: str) -> None:
        """A task was up to date."""

    def failed(self, task: str, message: str) -> None:
        """A task failed."""

    def skipped(self, task: str, message: str) -> None:
        """A task was not tried, because one before it failed."""

    def ended(self) -> None:
        """Nothing more comes."""


class LineObserver:
    """Writes a line for each task that is done or fails, and for what a running task says.

    Args:
        write: Takes the text of an event, which may have several lines.
        suffix: Text after the name of each task, such as `@KIND` on a node of a cluster.
    """

    def __init__(self, write: Callable[[str], object], *, suffix: str = "") -> None:
        self._write_line, self._suffix = write, suffix
        self._started_s: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def started(self, task: str) -> None:
        """Remembers when a task began."""
        self._started_s[task] = time.monotonic()

    def said(self, task: str, line: str) -> None:
        """Writes a line of a running task."""
        self._write_line(f"  {task}{self._suffix}: {line}")

    def progressed(self, task: str, fraction: float) -> None:
        """Writes nothing: lines show whole tasks."""

    def finished(self, task: str) -> None:
        """Writes that a task is done, and how long it took in seconds."""
        self._counts["done"] += 1
        now_s = time.monotonic()
        self._write_line(f"done {task}{self._suffix} ({now_s - self._started_s.get(task, now_s):.1f} s)")

    def current(self, task: str) -> None:  # noqa: ARG002
        """Counts a task that was up to date."""
        self._counts["current"] += 1

    def failed(self, task: str, message: str) -> None:
        """Writes why a task failed."""
        self._counts["failed"] += 1
        self._write_line(f"FAILED {task}{self._suffix}\nerror: {message}")

    def skipped(self, task: str, message: str) -> None:  # noqa: ARG002
        """Counts a task that was not tried, since one before it failed."""
        self._counts["skipped"] += 1

    def ended(self) -> None:
        """Writes how many tasks were done, up to date, failed and not tried."""
        count = self._counts
        if count["done"] or count["current"] or count["failed"]:
            failed = f", {count['failed']} failed, {count['skipped']} not tried" if count["failed"] else ""
            self._write_line(f"{count['done']} done, {count['current']} up to date{failed}")
