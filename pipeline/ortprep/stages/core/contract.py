"""The contract of a stage, its plan and its variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ortprep.bundle.loader_config import SOURCE_PRECISION
from ortprep.spec.conversion import ConvertSpec
from ortprep.spec.models import ModelSpec

PORTABLE = "portable"
"""The variant every bundle carries: operators of ONNX and of the source only, for any machine."""


@dataclass(frozen=True)
class VariantPlan:
    """One variant to build.

    Attributes:
        name: Unique in the bundle: `cpu`, `cuda-fp16`, `portable`, ….
        precision: `fp32` (as the source), `fp16`, `bf16`, `int8` or `int4`.
        is_converted: Whether its graph differs from its parent's.
    """

    name: str
    target: str
    precision: str = SOURCE_PRECISION
    is_converted: bool = False

    @property
    def has_own_precision(self) -> bool:
        """Whether it is in another precision than the source, so that a gate judges its answers."""
        return self.precision != SOURCE_PRECISION

    @property
    def parent(self) -> str | None:
        """The variant whose graph it is converted from, None for the source's."""
        return self.target if self.has_own_precision else None


def _variants_of(convert: ConvertSpec | None, target: str) -> Iterator[VariantPlan]:
    """Yields the variants that a target gets, each after its parent."""
    yield VariantPlan(target, target, is_converted=convert is not None and convert.fusion is not None)
    for precision in () if convert is None else convert.precisions(target):
        yield VariantPlan(f"{target}-{precision}", target, precision, is_converted=True)


LEFT_OUT = "left_out"
"""Key of a result that says why a variant is left out; tasks that require it are left out too."""


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
    """Files and result of an earlier task, and the key it was done with."""

    folder: Path
    result: Mapping[str, Any]
    key: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The build of one spec on this machine.

    Attributes:
        targets: Targets that are built, in order of preference.
    """

    spec: ModelSpec
    targets: tuple[str, ...]

    @cached_property
    def variant_plans(self) -> Mapping[str, VariantPlan]:
        """Variants to build, by name: each target's variants, and the portable one last."""
        own = (one for target in self.targets for one in _variants_of(self.spec.convert, target))
        return {one.name: one for one in (*own, VariantPlan(PORTABLE, "cpu"))}

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


Progress = Callable[[float], None]


@dataclass(frozen=True)
class Context:
    """Input of a stage.

    Attributes:
        upstream: Results of exactly the required tasks.
        folder: Empty folder for this task's files; it becomes visible only if the stage succeeds.
        key: Everything that decided that the task runs: the stage's `key` and more.
        progress: Takes the fraction of the work that is done, from 0 to 1, as often as it is known.
    """

    plan: Plan
    variant: str | None
    upstream: Mapping[TaskId, Upstream]
    folder: Path
    say: Callable[[str], None]
    key: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = lambda _fraction: None

    @property
    def variant_plan(self) -> VariantPlan:
        """The plan of the task's variant; tasks that run once per model have none."""
        assert self.variant is not None
        return self.plan.variant_plans[self.variant]

    @property
    def target(self) -> str:
        """The target of the task's variant: `cpu` or `cuda`."""
        return self.variant_plan.target

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self.plan.spec

    @property
    def subject(self) -> str:
        """What is built, for messages: `NAME/VARIANT`."""
        return f"{self.spec.name}/{self.variant}"

    @property
    def tunes_forks(self) -> bool:
        """Whether plans of the task's variant are compared as forked workers."""
        return self.spec.tune.fork and self.target == "cpu"


class Stage(Protocol):
    """One step of the build."""

    @property
    def name(self) -> str:
        """Name for the user."""

    @property
    def version(self) -> int:
        """Incremented whenever the same inputs would give another result."""

    def variants(self, plan: Plan) -> tuple[str | None, ...]:
        """Returns the variants the stage runs for, in build order; `(None,)` for once per model."""

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:
        """Returns the tasks whose outcome `run` reads."""

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:
        """Returns everything besides the required tasks' results that decides this one's, as JSON types.

        Spec subset, tool versions, hardware fingerprint. Equal key and equal inputs mean: nothing to do.
        Every `doit prepare` computes it, so it reads no model and imports nothing heavy. The names
        `pipeline`, `stage_version` and `upstream` are reserved.
        """

    def run(self, context: Context) -> Mapping[str, Any]:
        """Does the work, writes files below `context.folder`, and returns the result as JSON types.

        Raises:
            PipelineError: The work failed.
        """
