"""A build of some models, on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        jobs: Maximum number of concurrent tasks, on this machine.
    """

    configs: Path
    artifacts: Path
    names: tuple[str, ...] = ()
    only: str | None = None
    skip_unavailable: bool = False
    jobs: int = 1


def build_here(request: BuildRequest, observer: Observer) -> tuple[PipelineError, ...]:
    """Builds what is not up to date, one bundle after the other, and returns the errors of failed tasks.

    With several jobs, as many bundles are under way as keep them busy. A failed model holds up no other.

    Raises:
        SpecError: A spec is wrong, or a target is not available; nothing was started.
    """
    builds = plan_builds(
        request.configs,
        request.artifacts,
        names=request.names,
        only=request.only,
        skip_unavailable=request.skip_unavailable,
    )
    return run_builds(builds, observer, jobs=request.jobs)
