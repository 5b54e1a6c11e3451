"""What a stage is: requires → run → ensures, over values, with its effects in one folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.spec.models import ModelSpec

PORTABLE = "portable"
"""The variant every bundle carries: operators of ONNX and of the source only, for any machine."""


@dataclass(frozen=True, order=True)
class TaskId:
    """One stage of one model, for one variant where the stage has variants.

    Attributes:
        stage: `fetch`, `optimize`, `verify`, `tune`, `measure` or `package`.
        variant: `cpu`, `cuda`, `portable`, or None for a stage that runs once per model.
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

    @property
    def variants(self) -> tuple[str, ...]:
        """Variants that are built: one per target, and the portable one."""
        return (*self.targets, PORTABLE)


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
