"""Results of the stages, which later stages read; kept as JSON in receipts. Outcomes of their steps."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ortprep.bundle.codec import decode
from ortprep.bundle.conversion_record import ConversionRecord, OutputAccuracy
from ortprep.bundle.loader_config import Variant
from ortprep.bundle.manifest import (
    Decision,
    LadderAttempt,
    MeasurementRecord,
    SourceRecord,
    TuningRecord,
    VerificationRecord,
)
from ortprep.bundle.model_facts import ModelInterface
from ortprep.bundle.session_record import SessionPlan
from ortprep.errors import ChildError, LoadError, StageError
from ortprep.spec.urls import parse_hub_url
from ortprep.stages.core.contract import PORTABLE, Context, Plan, TaskId


@dataclass(frozen=True)
class FetchResult:
    """Result of `fetch` and `convert`.

    Files: the model and its external data, where the model looks for them.

    Attributes:
        model: Path of the model file in the stage's folder.
        conversion: Record of its conversion, None for the source.
    """

    model: str
    source: SourceRecord
    interface: ModelInterface
    conversion: ConversionRecord | None = None


@dataclass(frozen=True)
class PreparedResult:
    """Result of `optimize` and `tune`: how jobs load a variant.

    Files: the model, and what its sessions read.

    Attributes:
        variant: The variant as the bundle will record it, with paths in the stage's folder, and without the
            files and the golden sample that `package` adds.
        step: The step that wrote its graph, as `Step.name` lists them.
        attempts: Every step that `optimize` tried, the taken one last.
        onnxruntime: ONNX Runtime version that wrote it.
        record: The search for its plan; None of `optimize`.
    """

    variant: Variant
    step: str
    attempts: tuple[LadderAttempt, ...]
    onnxruntime: str
    record: TuningRecord | None = None


def session_of(folder: Path, variant: Variant) -> SessionPlan:
    """Returns the session that jobs make of a variant whose files are in a folder."""
    return SessionPlan(str(folder / variant.model), variant.session_options, variant.providers)


@dataclass(frozen=True)
class VerifyResult:
    """Result of `verify`.

    Files of the one task that runs the source (see `verify.reference`): the reference, its samples, and
    `golden.npz` with arrays `input:NAME` and `output:NAME`. The task of a variant in another precision leaves
    `own_golden.npz`: an input, and what the variant answers. The others leave none.

    Attributes:
        accuracy: Accuracy of a converted variant, per output, against the unconverted source.
    """

    record: VerificationRecord
    accuracy: tuple[OutputAccuracy, ...] = ()


@dataclass(frozen=True)
class MeasureResult:
    """Result of `measure`. No files.

    Attributes:
        fallback: Plan that the portable variant ships; None where it was not measured with this one.
    """

    measurements: tuple[MeasurementRecord, ...]
    decision: Decision
    fallback: Decision | None = None


FETCH = TaskId("fetch")


@dataclass(frozen=True)
class Graph:
    """An unoptimised model, as a file.

    Attributes:
        folder: Its files and no others, free of links.
    """

    description: FetchResult
    folder: Path

    @property
    def path(self) -> Path:
        """The model file."""
        return self.folder / self.description.model

    @property
    def conversion(self) -> ConversionRecord | None:
        """Record of its conversion, None for the source."""
        return self.description.conversion


def source_task(plan: Plan, variant: str | None) -> TaskId:
    """Returns the task whose graph a variant is made of; None stands for the source."""
    if variant is None:
        return FETCH
    variant_plan = plan.variant_plans[variant]
    return TaskId("convert", variant) if variant_plan.is_converted else source_task(plan, variant_plan.parent)


def read_source(context: Context) -> Graph:
    """Returns the graph that the task's variant is made of."""
    return read_graph(context, source_task(context.plan, context.variant))


def read_fetched(context: Context) -> Graph:
    """Returns the source itself."""
    return read_graph(context, FETCH)


def read_location(context: Context) -> str:
    """Returns where the source came from: its path, or its URL at the commit."""
    source = read_fetched(context).description.source
    if source.kind == "path":
        return source.location
    commit = context.upstream[FETCH].key["source"]["commit"]
    return str(replace(parse_hub_url(source.location), revision=commit))


def read_graph(context: Context, task: TaskId) -> Graph:
    """Returns the graph that a task before this one left."""
    upstream = context.upstream[task]
    return Graph(decode(FetchResult, upstream.result), upstream.folder.resolve())


def prepared_task(plan: Plan, variant: str) -> TaskId:
    """Returns the task that produces what jobs load; the portable variant is not tuned."""
    is_tuned = plan.spec.tune.max_trials > 0 and variant != PORTABLE
    return TaskId("tune" if is_tuned else "optimize", variant)


def read_prepared(context: Context, variant: str) -> tuple[PreparedResult, Path]:
    """Returns what jobs load of a variant, and the folder it is in."""
    upstream = context.upstream[prepared_task(context.plan, variant)]
    return decode(PreparedResult, upstream.result), upstream.folder


def read_optimized(context: Context, variant: str | None) -> tuple[PreparedResult, Path]:
    """Returns what `optimize` made of a variant, before any search, and the folder it is in."""
    upstream = context.upstream[TaskId("optimize", variant)]
    return decode(PreparedResult, upstream.result), upstream.folder.resolve()


TAKEN = "taken"
"""Outcome of the step that holds."""

_MAX_MESSAGE = 4000
"""Characters of a message that are looked at: it has names of the model, which may be megabytes."""

_PLACE = re.compile(r"(?<!\S)\S*onnxruntime\S*\.(?:cc|h):\d+ .*?(?:\)(?: const)? (?=[A-Z])| was false\. )")

REFUSALS = (LoadError, ChildError, StageError)
"""Errors that mean that a step does not hold."""


def describe_failures(attempts: Iterable[tuple[str, str]]) -> str:
    """Returns steps and their outcomes as indented lines of an error; equal outcomes share a line."""
    steps: dict[str, list[str]] = {}
    for step, outcome in attempts:
        steps.setdefault(outcome.strip(), []).append(step)
    lines = (f"{', '.join(names)}: {outcome}" for outcome, names in steps.items())
    return textwrap.indent("\n".join(lines), "  ")


def plain_refusal(message: str) -> str:
    """Returns ONNX Runtime's message in one line, without places in its sources."""
    plain = _PLACE.sub("", message[:_MAX_MESSAGE])
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("ONNX Runtime cannot load"):
        del lines[0]
    return " ".join(lines)[:600]
