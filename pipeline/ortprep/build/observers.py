"""Events of a build, and lines that say them. Needs nothing that only a build needs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

EventKind = Literal["started", "said", "progressed", "finished", "current", "failed", "skipped", "ended"]


class BuildEvent(NamedTuple):
    """One event of a build.

    Attributes:
        kind: The task `started`, `said` something, `progressed`, was `finished`, `current` (up to date), or
            `failed`, or was `skipped` because one before it failed; `ended`: nothing more comes.
        task: `STAGE:MODEL` or `STAGE:MODEL/VARIANT`; "" where the build as a whole ended.
        text: Line that the task said, or why it failed or was skipped; else "".
        fraction: Completed fraction of this task's work, from 0 to 1, as far as it is known.
    """

    kind: EventKind
    task: str = ""
    text: str = ""
    fraction: float = 0.0


Observer = Callable[[BuildEvent], None]
"""Takes the events of a build; what a running task says may come on another thread than the rest."""


class LineObserver:
    """Writes a line for each task that is done or fails, and for what a running task says.

    Args:
        write: Takes the text of an event, which may have several lines.
        suffix: Text after the name of each task, such as `@KIND` on a node of a cluster.
    """

    def __init__(self, write: Callable[[str], object], *, suffix: str = "") -> None:
        self._write_line, self._suffix = write, suffix
        self._started_s: dict[str, float] = {}
        self._counts: Counter[EventKind] = Counter()

    def __call__(self, event: BuildEvent) -> None:
        """Writes what an event has to say, and at the end how many tasks were done, up to date and failed."""
        name, now_s = f"{event.task}{self._suffix}", time.monotonic()
        self._counts[event.kind] += 1
        match event.kind:
            case "started":
                self._started_s[event.task] = now_s
            case "said":
                self._write_line(f"  {name}: {event.text}")
            case "finished":
                self._write_line(f"done {name} ({now_s - self._started_s.get(event.task, now_s):.1f} s)")
            case "failed":
                self._write_line(f"FAILED {name}\nerror: {event.text}")
            case "ended":
                self._write_counts()

    def _write_counts(self) -> None:
        count = self._counts
        if count["finished"] or count["current"] or count["failed"]:
            failed = f", {count['failed']} failed, {count['skipped']} not tried" if count["failed"] else ""
            self._write_line(f"{count['finished']} done, {count['current']} up to date{failed}")
