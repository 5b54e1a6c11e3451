"""Build engines: this machine's, and what another one has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ortprep.build.build_plan import plan_builds
from ortprep.build.runner import Observer, run_builds
from ortprep.errors import PipelineError


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
    """Runs the stages of `build.build_plan.STAGES`."""

    def prepare(self, order: BuildRequest, observer: Observer) -> BuildResult:
        """Builds what is not up to date; when a model fails, the others go on.

        Raises:
            SpecError: A spec is wrong, or a target is not available; nothing was started.
            PipelineError: The engine itself cannot work.
        """
        ...


class LocalEngine:
    """This machine: one bundle after the other, with several jobs as many as keep them busy."""

    def prepare(self, order: BuildRequest, observer: Observer) -> BuildResult:
        """Builds what is not up to date; raises as `Engine.prepare` does."""
        builds = plan_builds(
            order.configs,
            order.artifacts,
            names=order.names,
            only=order.only,
            skip_unavailable=order.skip_unavailable,
        )
        errors = run_builds(builds, observer, jobs=order.jobs)
        return BuildResult(not errors, errors)
