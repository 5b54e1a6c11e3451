"""The graph that a variant is made of: the source, or what `convert` made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.bundle.codec import decode
from pipeline.bundle.conversion_record import ConversionRecord
from pipeline.stages.contract import Context, Plan, TaskId
from pipeline.stages.results import ConvertResult, FetchResult

FETCH = TaskId("fetch")


@dataclass(frozen=True)
class Graph:
    """An unoptimised model, as a file.

    Attributes:
        description: What is in it.
        folder: Its files and no others, free of links.
        conversion: How it was converted, None for the source.
    """

    description: FetchResult
    folder: Path
    conversion: ConversionRecord | None = None

    @property
    def path(self) -> Path:
        """The model file."""
        return self.folder / self.description.model


def source_task(plan: Plan, variant: str | None) -> TaskId:
    """Returns the task whose graph a variant is made of; None stands for the source."""
    if variant is None:
        return FETCH
    wanted = plan.variant_plans[variant]
    return TaskId("convert", variant) if wanted.is_converted else source_task(plan, wanted.parent)


def read_source(context: Context) -> Graph:
    """Returns the graph that the task's variant is made of."""
    return read_graph(context, source_task(context.plan, context.variant))


def read_fetched(context: Context) -> Graph:
    """Returns the source itself."""
    return read_graph(context, FETCH)


def read_graph(context: Context, task: TaskId) -> Graph:
    """Returns the graph that a task before this one left."""
    upstream = context.upstream[task]
    folder = upstream.folder.resolve()
    if task == FETCH:
        return Graph(decode(FetchResult, upstream.result), folder)
    made = decode(ConvertResult, upstream.result)
    return Graph(made.converted, folder, made.record)
