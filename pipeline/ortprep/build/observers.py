"""Events of a build. Needs nothing that only a build needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

EventKind = Literal["started", "said", "progressed", "finished", "current", "failed", "skipped", "ended"]


class BuildEvent(NamedTuple):
    """One event of a build.

    Attributes:
        kind: The task `started`, `said` something, `progressed`, was `finished`, `current` (up to date), or
            `failed`, or was `skipped` because one before it failed; `ended`: nothing more comes.
        task: `STAGE:MODEL` or `STAGE:MODEL/VARIANT`; `init:MODEL` while a spec is drafted; "" where the build
            as a whole ended.
        text: Line that the task said, or why it failed or was skipped; else "".
        fraction: Completed fraction of this task's work, from 0 to 1, as far as it is known.
    """

    kind: EventKind
    task: str = ""
    text: str = ""
    fraction: float = 0.0

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.task, self.text)))


Observer = Callable[[BuildEvent], None]
"""Takes the events of a build; what a running task says may come on another thread than the rest."""
