"""Build engines, and the observer of a build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ortprep.errors import PipelineError


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


@dataclass(frozen=True)
class BuildRequest:
    """What to prepare.

    Attributes:
        configs: Folder of `NAME.yaml` files and `defaults.yaml`.
        artifacts: Folder of the bundles.
        names: Models; all of them if empty.
        jobs: Maximum number of concurrent tasks, for an engine that runs them itself.
    """

    configs: Path
    artifacts: Path
    names: tuple[str, ...] = ()
    only: str | None = None
    skip_unavailable: bool = False
    jobs: int = 1


@dataclass(frozen=True)
class BuildResult:
    """Whether every bundle is up to date now, and the errors of the failed tasks."""

    done: bool
    errors: tuple[PipelineError, ...]


class Engine(Protocol):
    """Runs the stages of `graph.build.STAGES`."""

    def prepare(self, order: BuildRequest, observer: Observer) -> BuildResult:
        """Builds what is not up to date; when a model fails, the others go on.

        Raises:
            SpecError: A spec is wrong, or a target is not available; nothing was started.
            PipelineError: The engine itself cannot work.
        """
        ...
