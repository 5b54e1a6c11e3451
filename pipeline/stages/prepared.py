"""Which task hands on what jobs load: the search where there is one, else the optimisation."""

from __future__ import annotations

from pathlib import Path

from pipeline.bundle.codec import decode
from pipeline.stages.contract import PORTABLE, Context, Plan, TaskId
from pipeline.stages.results import OptimizeResult, TuneResult


def prepared_task(plan: Plan, variant: str) -> TaskId:
    """Returns the task that hands on what jobs load; the portable variant is not tuned."""
    is_tuned = plan.spec.tune.needs_trials and variant != PORTABLE
    return TaskId("tune" if is_tuned else "optimize", variant)


def read_prepared(context: Context, variant: str) -> tuple[OptimizeResult, Path]:
    """Returns what jobs load of a variant, and the folder it is in."""
    upstream = context.upstream[prepared_task(context.plan, variant)]
    tuned = read_tuned(context, variant)
    return tuned.prepared if tuned else decode(OptimizeResult, upstream.result), upstream.folder


def read_tuned(context: Context, variant: str) -> TuneResult | None:
    """Returns what the search for a variant's plan found, None if there was none."""
    task = prepared_task(context.plan, variant)
    return decode(TuneResult, context.upstream[task].result) if task.stage == "tune" else None
