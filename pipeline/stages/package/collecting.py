"""What earlier stages found out about each variant, and which is preferred. Pure but for reading results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pipeline.bundle.codec import decode
from pipeline.bundle.conversion_record import ConversionRecord, LeftOut
from pipeline.stages.contract import LEFT_OUT, PORTABLE, Context, TaskId
from pipeline.stages.measure.contenders import PARENT, PREPARED
from pipeline.stages.measure.decision import DEFAULT, STEADY_ALLOWANCE
from pipeline.stages.prepared import read_prepared, read_tuned
from pipeline.stages.results import MeasureResult, OptimizeResult, TuneResult, VerifyResult
from pipeline.stages.sources import FETCH, source_task
from pipeline.stages.variants import SOURCE_PRECISION, VariantPlan
from pipeline.tuning.objective import Objective, objective_of


@dataclass(frozen=True)
class PreparedVariant:
    """All that earlier stages found out about one variant.

    Attributes:
        plan: What it was to be.
        optimized: What jobs load, after the search where there was one.
        verified: Its answers against the source's.
        measured: What it costs, None for the portable variant.
        tuned: What the search found, None without one.
        folder: Where its files are.
        verified_folder: Where its own golden sample is, if it has one.
        conversion: How its graph was converted, None if it was not.
    """

    plan: VariantPlan
    optimized: OptimizeResult
    verified: VerifyResult
    measured: MeasureResult | None
    tuned: TuneResult | None
    folder: Path
    verified_folder: Path
    conversion: ConversionRecord | None

    @property
    def name(self) -> str:
        """Its name in the bundle."""
        return self.plan.name

    @property
    def precision(self) -> str:
        """What it came to be in."""
        return SOURCE_PRECISION if self.conversion is None else self.conversion.precision

    @property
    def shipped(self) -> str:
        """Name of the plan that is shipped."""
        return self.measured.decision.shipped if self.measured else PREPARED


def collect_variants(context: Context) -> tuple[PreparedVariant, ...]:
    """Returns the variants there are: targets as the plan has them, the fastest precision of each first.

    Those for certain shapes only come last of their target; they are never taken but by their shapes.
    """
    plan = context.plan
    there = [_collect(context, name) for name in plan.variants if _why_left_out(context, name) is None]
    rank = {target: position for position, target in enumerate(plan.targets)}
    runs = objective_of(context.spec.tune)

    def preference(prepared: PreparedVariant) -> tuple[int, bool, float]:
        last = len(rank)
        position = last if prepared.name == PORTABLE else rank[prepared.plan.target]
        return position, prepared.plan.is_bucket, _relative_cost(prepared, runs)

    return tuple(sorted(there, key=preference))


def _relative_cost(prepared: PreparedVariant, objective: Objective) -> float:
    """Returns what a session costs relative to the target's fp32 one; a small gain does not count as one."""
    if prepared.measured is None or prepared.plan.parent is None or prepared.plan.is_bucket:
        return 1.0
    figures = {plan.plan: plan for plan in prepared.measured.measurements[0].plans}
    if PARENT not in figures:
        return math.inf
    costs = {
        name: one.first_result_ms.median + (objective.runs_per_load - 1) * one.steady_ms.median
        for name, one in figures.items()
    }
    # Where default ONNX Runtime is the faster one, it is what the fp32 variant ships.
    ratio = costs[PREPARED] / min(costs[PARENT], costs.get(DEFAULT, math.inf))
    return ratio if ratio * STEADY_ALLOWANCE < 1 else max(ratio, math.nextafter(1.0, 2.0))


def _why_left_out(context: Context, variant: str) -> str | None:
    result = context.upstream[TaskId("verify", variant)].result
    return str(result[LEFT_OUT]) if LEFT_OUT in result else None


def collect_left_out(context: Context) -> tuple[LeftOut, ...]:
    """Returns the variants there are not, and why."""
    reasons = {name: _why_left_out(context, name) for name in context.plan.variants}
    return tuple(
        LeftOut(name, reason, _conversion(context, name)) for name, reason in reasons.items() if reason
    )


def _conversion(context: Context, variant: str) -> ConversionRecord | None:
    task = source_task(context.plan, variant)
    record = None if task == FETCH else context.upstream[task].result.get("record")
    return None if record is None else decode(ConversionRecord, record)


def _collect(context: Context, variant: str) -> PreparedVariant:
    upstream = context.upstream
    measured = upstream.get(TaskId("measure", variant))
    verified = upstream[TaskId("verify", variant)]
    optimized, folder = read_prepared(context, variant)
    return PreparedVariant(
        plan=context.plan.variant_plans[variant],
        optimized=optimized,
        verified=decode(VerifyResult, verified.result),
        measured=decode(MeasureResult, measured.result) if measured else None,
        tuned=read_tuned(context, variant),
        folder=folder,
        verified_folder=verified.folder,
        conversion=_conversion(context, variant),
    )
