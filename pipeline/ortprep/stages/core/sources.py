"""The graph that a variant is made of, and the task that produces what jobs load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ortprep.bundle.codec import decode
from ortprep.bundle.conversion_record import ConversionRecord
from ortprep.spec.hub_url import is_hub_url, parse_hub_url
from ortprep.stages.core.contract import PORTABLE, Context, Plan, TaskId
from ortprep.stages.core.results import FetchResult, PreparedResult

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
    """Returns where the source came from: path, URL or demo name; on the Hub at its commit."""
    location = read_fetched(context).description.source.location
    if not is_hub_url(location):
        return location
    commit = context.upstream[FETCH].key["source"]["commit"]
    return str(replace(parse_hub_url(location), revision=commit))


def read_graph(context: Context, task: TaskId) -> Graph:
    """Returns the graph that a task before this one left."""
    upstream = context.upstream[task]
    return Graph(decode(FetchResult, upstream.result), upstream.folder.resolve())


def prepared_task(plan: Plan, variant: str) -> TaskId:
    """Returns the task that produces what jobs load; the portable variant is not tuned."""
    is_tuned = plan.spec.tune.needs_trials and variant != PORTABLE
    return TaskId("tune" if is_tuned else "optimize", variant)


def read_prepared(context: Context, variant: str) -> tuple[PreparedResult, Path]:
    """Returns what jobs load of a variant, and the folder it is in."""
    upstream = context.upstream[prepared_task(context.plan, variant)]
    return decode(PreparedResult, upstream.result), upstream.folder


def read_optimized(context: Context, variant: str | None) -> tuple[PreparedResult, Path]:
    """Returns what `optimize` made of a variant, before any search, and the folder it is in."""
    upstream = context.upstream[TaskId("optimize", variant)]
    return decode(PreparedResult, upstream.result), upstream.folder.resolve()
