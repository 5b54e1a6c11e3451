"""From a folder of specs to the tasks of every model: what dodo.py and the command line share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.errors import SpecError
from pipeline.graph.destinations import check_destinations
from pipeline.graph.execution import Task, build_tasks
from pipeline.graph.planning import build_plans
from pipeline.runtime.availability import unavailable_reason
from pipeline.spec.models import ModelSpec
from pipeline.spec.reading import read_specs
from pipeline.stages.contract import Stage
from pipeline.stages.convert.stage import Convert
from pipeline.stages.fetch.stage import Fetch
from pipeline.stages.measure.stage import Measure
from pipeline.stages.optimize.stage import Optimize
from pipeline.stages.package.stage import Package
from pipeline.stages.tune.stage import Tune
from pipeline.stages.verify.stage import Verify
from pipeline.tuning.knobs import find_space_problems

STAGES: tuple[Stage, ...] = (Fetch(), Convert(), Optimize(), Verify(), Tune(), Measure(), Package())
"""The build, in order."""


def plan_builds(
    configs: Path,
    artifacts: Path,
    *,
    names: Sequence[str] = (),
    only: str | None = None,
    skip_unavailable: bool = False,
) -> tuple[tuple[Task, ...], ...]:
    """Reads specs and returns each model's tasks, in build order.

    Args:
        configs: Folder of `NAME.yaml` files and `defaults.yaml`.
        artifacts: Folder that bundles are written to.
        names: Models to build; all of them if empty.
        only: Build this target alone.
        skip_unavailable: Build the rest when a named target is not available.

    Raises:
        SpecError: A spec is wrong, a name is unknown, a target is not available, or something that is no
            bundle is in a bundle's place.
    """
    specs = read_build_specs(configs, artifacts, names=names)
    plans = build_plans(
        specs, unavailable_reason=unavailable_reason, only=only, skip_unavailable=skip_unavailable
    )
    return tuple(build_tasks(plan, STAGES, artifacts.absolute()) for plan in plans)


def read_build_specs(configs: Path, artifacts: Path, *, names: Sequence[str] = ()) -> tuple[ModelSpec, ...]:
    """Reads specs and refuses what could not be built anywhere; arguments as of `plan_builds`.

    Raises:
        SpecError: A spec is wrong, a name is unknown, or something that is no bundle is in a bundle's place.
    """
    specs = read_specs(configs, names=names)
    _check_spaces(specs)
    check_destinations(specs, artifacts.absolute())
    return specs


def _check_spaces(specs: Iterable[ModelSpec]) -> None:
    problems = [
        f"{spec.name}: tune.space: {problem}"
        for spec in specs
        if spec.tune.space
        for problem in find_space_problems(spec.tune.space)
    ]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise SpecError(f"specs restrict the search to what there is not\n{lines}", hint="ortprep schema")
