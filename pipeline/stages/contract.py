"""What a stage is: requires → run → ensures, over values, with its effects in one folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import StageError
from pipeline.spec.models import ModelSpec
from pipeline.stages.variants import PORTABLE, VariantPlan, plan_variants

__all__ = ["LEFT_OUT", "PORTABLE", "Context", "Plan", "Stage", "TaskId", "Upstream", "target_of"]

LEFT_OUT = "left_out"
"""Key of a result that says why a variant is not built after all; whatever requires it is left out too."""


@dataclass(frozen=True, order=True)
class TaskId:
    """One stage of one model, for one variant where the stage has variants.

    Attributes:
        stage: `fetch`, `convert`, `optimize`, `verify`, `tune`, `measure` or `package`.
        variant: Name of a `VariantPlan`, or None for a stage that runs once per model.
    """

    stage: str
    variant: str | None = None

    def __str__(self) -> str:
        return self.stage if self.variant is None else f"{self.stage}/{self.variant}"


@dataclass(frozen=True)
class Upstream:
    """What an earlier task left: its files and its result."""

    folder: Path
    result: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is built of one spec on this machine.

    Attributes:
        spec: The model.
        targets: Those that are built, in order of preference.
        missing: Targets of the spec that this machine lacks and the user agreed to skip, with the reason.
    """

    spec: ModelSpec
    targets: tuple[str, ...]
    missing: Mapping[str, str]

    @cached_property
    def variant_plans(self) -> Mapping[str, VariantPlan]:
        """What is built, by name: each target's variants, and the portable one last."""
        return {variant.name: variant for variant in plan_variants(self.spec.convert, self.targets)}

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants that are built."""
        return tuple(self.variant_plans)

    @property
    def tuned_variants(self) -> tuple[str, ...]:
        """Names of those that are tuned and measured: all but the portable one."""
        return tuple(name for name in self.variants if name != PORTABLE)


def target_of(plan: Plan, variant: str | None) -> str:
    """Returns what a variant runs on: `cpu` or `cuda`; for a task without a variant, `cpu`."""
    return "cpu" if variant is None else plan.variant_plans[variant].target


@dataclass(frozen=True)
class Context:
    """What a stage is given.

    Attributes:
        plan: The model and its targets.
        variant: The variant this task is for, or None.
        upstream: Earlier tasks' outcomes; exactly those the stage asked for.
        folder: Empty folder for this task's files; it becomes visible only if the stage succeeds.
        kept: Folder for what a later run of the same task may go on with if this one is killed; it need not
            be there yet, and is removed when the task is done or its key has changed.
        say: Takes one line of progress.
    """

    plan: Plan
    variant: str | None
    upstream: Mapping[TaskId, Upstream]
    folder: Path
    say: Callable[[str], None]
    kept: Path

    @property
    def variant_plan(self) -> VariantPlan:
        """What the task's variant is.

        Raises:
            StageError: The task is for no variant.
        """
        if self.variant is None:
            raise StageError("the stage runs once per variant\n  expected a variant, got none")
        return self.plan.variant_plans[self.variant]

    @property
    def target(self) -> str:
        """What the task's variant runs on: `cpu` or `cuda`."""
        return self.variant_plan.target

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self.plan.spec


class Stage(Protocol):
    """One step of the build."""

    @property
    def name(self) -> str:
        """As the user sees it."""
        ...

    @property
    def version(self) -> int:
        """Raised by one whenever the same inputs would give another outcome."""
        ...

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        """Returns the variants the stage runs for, in build order; `(None,)` for once per model."""
        ...

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        """Returns the tasks whose outcome `run` reads."""
        ...

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        """Returns everything besides the required tasks' outcome that decides this one's, as JSON types.

        Spec subset, tool versions, hardware fingerprint. Equal key and equal inputs mean: nothing to do.
        It is computed on every `doit prepare`, so it reads no model and imports nothing heavy. The names
        `pipeline`, `stage_version` and `upstream` are the graph's own.
        """
        ...

    def run(self, context: Context) -> Mapping[str, Any]:
        """Does the work, writes files below `context.folder`, and returns the result as JSON types.

        Raises:
            PipelineError: The work failed.
        """
        ...

    def ensures(self, context: Context, result: Mapping[str, Any]) -> None:
        """Checks what later stages rely on.

        Raises:
            StageError: `run` returned, but did not do what it promises.
        """
        ...
