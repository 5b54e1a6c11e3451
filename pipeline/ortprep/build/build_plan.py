"""From a folder of specs to the tasks of every model: what dodo.py and the command line share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from ortprep.build.execution import Task, build_tasks
from ortprep.build.receipts import model_folder, written_paths
from ortprep.bundle.file_links import refuse_links
from ortprep.bundle.verification import describe_loss
from ortprep.children.availability import unavailable_reason
from ortprep.errors import SourceError, SpecError
from ortprep.quoting import quoted
from ortprep.spec.fields import Target
from ortprep.spec.models import ModelSpec
from ortprep.spec.reading import read_specs
from ortprep.stages.convert.stage import ConvertStage
from ortprep.stages.core.contract import Plan, Stage
from ortprep.stages.fetch.stage import FetchStage, local_source
from ortprep.stages.measure.stage import MeasureStage
from ortprep.stages.optimize.stage import OptimizeStage
from ortprep.stages.package.stage import PackageStage
from ortprep.stages.tune.stage import TuneStage
from ortprep.stages.verify.stage import VerifyStage

KNOWN_TARGETS: tuple[str, ...] = get_args(Target)
"""Every target; a runtime job prefers later ones."""

STAGES: tuple[Stage, ...] = (
    FetchStage(),
    ConvertStage(),
    OptimizeStage(),
    VerifyStage(),
    TuneStage(),
    MeasureStage(),
    PackageStage(),
)
"""The build, in order."""


def plan_builds(
    configs: Path,
    artifacts: Path,
    *,
    names: Sequence[str] = (),
    only: str | None = None,
) -> tuple[tuple[Task, ...], ...]:
    """Reads specs and returns each model's tasks, in build order.

    Args:
        configs: Folder of `NAME.yaml` files and `defaults.yaml`.
        artifacts: Folder that bundles are written to.
        names: Models to build; all of them if empty.
        only: Build this target alone.

    Raises:
        SpecError: A spec is wrong, a name is unknown, a target is not available, something that is no bundle
            is in a bundle's place, or the artifacts folder has links.
    """
    specs = read_specs(configs, names=names)
    check_buildable(specs, artifacts)
    return plan_specs(specs, artifacts, only=only)


def plan_specs(
    specs: Iterable[ModelSpec], artifacts: Path, *, only: str | None = None
) -> tuple[tuple[Task, ...], ...]:
    """Returns each spec's tasks, in build order; arguments as of `plan_builds`.

    Raises:
        SpecError: Specs cannot be built here; it has every problem.
    """
    plans, problems = [], []
    for spec in specs:
        try:
            plans.append(build_plan(spec, only=only))
        except SpecError as error:
            problems.append(error)
    if problems:
        raise SpecError("\n".join(problem.message for problem in problems), hint=problems[0].hint)
    return tuple(build_tasks(plan, STAGES, artifacts.absolute()) for plan in plans)


def check_buildable(specs: Sequence[ModelSpec], artifacts: Path) -> None:
    """Refuses specs that could not be built anywhere, or where something would be lost.

    Raises:
        SpecError: A bundle would replace something else than an older one, or its own source, or the
            artifacts folder has links; it names all such models.
    """
    refuse_links(written_paths(artifacts.absolute(), [spec.name for spec in specs]))
    problems = [
        (f"  {spec.name}: {problem}", hint)
        for spec in specs
        for problem, hint in _find_problems(spec, artifacts.absolute())
    ]
    if problems:
        lines, hints = zip(*problems, strict=True)
        raise SpecError("specs that cannot be built\n" + "\n".join(lines), hint=hints[0])


def _find_problems(spec: ModelSpec, artifacts: Path) -> Iterator[tuple[str, str]]:
    """Yields what a build must not replace or delete, with what to do."""
    bundle = artifacts / spec.name
    if got := describe_loss(bundle):
        aside = quoted("mv", bundle, f"{bundle}.mine")
        yield (
            "a bundle would replace something that is not a bundle\n"
            f"    expected nothing, an empty folder or a bundle at {bundle}, got {got}",
            f"{aside}   # or build elsewhere: --artifacts DIR",
        )
    for folder in (bundle, model_folder(artifacts, spec.name)):
        if _holds_source(folder, spec):
            yield (
                f"expected its source outside {folder}, got one that would be deleted with it",
                "copy the source elsewhere, with its external data, and set source.path in its spec",
            )


def build_plan(spec: ModelSpec, *, only: str | None = None) -> Plan:
    """Decides what is built of one spec; `targets: auto` takes the available ones.

    Raises:
        SpecError: A named target is not available, `only` is not in the spec, or nothing is left to build.
    """
    requested = KNOWN_TARGETS if spec.targets == "auto" else tuple(dict.fromkeys(spec.targets))
    if only is not None and only not in requested:
        raise SpecError(
            f"no such target in {spec.name}: {only}\n  expected one of {', '.join(requested)}",
            hint=f"add it to targets: of the spec, or run: ortprep prepare {quoted(spec.name)}"
            if only in KNOWN_TARGETS
            else f"ortprep prepare {quoted(spec.name)}",
        )
    reasons = {target: unavailable_reason(target) for target in requested if only in (None, target)}
    lacking = {target: reason for target, reason in reasons.items() if reason is not None}
    targets = tuple(
        target for target in reversed(KNOWN_TARGETS) if target in reasons and target not in lacking
    )
    if not targets or (lacking and (spec.targets != "auto" or only is not None)):
        raise _unavailable(spec.name, lacking, requested=requested)
    return Plan(spec=spec, targets=targets)


def _unavailable(name: str, lacking: dict[str, str], *, requested: tuple[str, ...]) -> SpecError:
    """Returns the error for targets that this machine cannot run."""
    left = [target for target in requested if target not in lacking]
    lines = "\n".join(f"  {target}: {reason}" for target, reason in lacking.items())
    return SpecError(
        f"target not available on this machine: {', '.join(lacking)} of {name}\n{lines}",
        hint=quoted("ortprep", "prepare", name, "--target", left[0])
        if left
        else f"targets: [cpu]   # in the spec of {quoted(name)}; every machine has it",
    )


def _holds_source(folder: Path, spec: ModelSpec) -> bool:
    try:
        source = local_source(spec)
    except SourceError:
        return False  # `fetch` says what is wrong with it
    # Not `Path.resolve`, which fails on links that lead in a circle.
    return source is not None and Path(os.path.realpath(source)).is_relative_to(os.path.realpath(folder))
