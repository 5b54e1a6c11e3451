"""Who is told how a build goes: implemented by the command line, called by the graph."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Takes the events of a build. `task` is `STAGE:MODEL` or `STAGE:MODEL/VARIANT`."""

    def started(self, task: str) -> None:
        """A task begins."""

    def said(self, task: str, line: str) -> None:
        """A running task has something to say; may be called in another process than the other events."""

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
