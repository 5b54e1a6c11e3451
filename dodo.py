"""The task graph as doit sees it: `doit list`, `prepare`, `prepare:NAME`, `clean`.

Variables: `doit configs=DIR artifacts=DIR target=T prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doit import get_var

from ortprep.build.build_plan import plan_builds
from ortprep.build.doit_tasks import build_doit_tasks, doit_config, spec_errors_as_doit_errors
from ortprep.cli.console import exit_when_interrupted, start_logging, start_streams
from ortprep.cli.progress import BuildObserver
from ortprep.telemetry import disable_telemetry

disable_telemetry()
start_streams()
start_logging(None)
exit_when_interrupted()
OBSERVER = BuildObserver()
DOIT_CONFIG = doit_config(OBSERVER)


@spec_errors_as_doit_errors
def task_build() -> Iterator[dict[str, Any]]:
    """Yields prepare and every stage of every model in configs/."""
    builds = plan_builds(
        Path(get_var("configs", "configs")),
        Path(get_var("artifacts", "artifacts")),
        only=get_var("target", None),
    )
    yield from build_doit_tasks(builds, OBSERVER)
