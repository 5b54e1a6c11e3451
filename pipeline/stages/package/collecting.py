"""What earlier stages found out about each variant, and which is preferred. Pure but for reading results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
        measured: What it costs, None if it was not measured.
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
    """Returns the variants there are, in the order that jobs prefer them in."""
    plan = context.plan
    there = [_collect(context, name) for name in plan.variants if _why_left_out(context, name) is None]
    return order_variants(there, plan.targets, objective_of(context.spec.tune))


def order_variants(
    variants: Iterable[PreparedVariant], targets: Sequence[str], objective: Objective
) -> tuple[PreparedVariant, ...]:
    """Returns variants in order of preference: targets in order, of each the cheapest precision first.

    What costs a CPU more than what fp32 ships there comes after the portable variant. Those for certain
    shapes come last of all: they are never taken but by their shapes, and a reader that does not know of them
    takes any other before.

    Args:
        variants: At least every target's own and the portable one.
        targets: In order of preference.
        objective: Runs of a session before it is gone.
    """
    by_name = {prepared.name: prepared for prepared in variants}
    rank = {target: position for position, target in enumerate(targets)}
    portable = rank.get("cpu", len(rank)) + 1

    def preference(prepared: PreparedVariant) -> tuple[bool, int, float]:
        bucket, target = prepared.plan.is_bucket, prepared.plan.target
        if prepared.name == PORTABLE:
            return bucket, portable, 0.0
        cost = _relative_cost(prepared, by_name[target], objective)
        return bucket, portable if target == "cpu" and cost > 1 else rank[target], cost

    return tuple(sorted(by_name.values(), key=preference))


def _relative_cost(prepared: PreparedVariant, base: PreparedVariant, objective: Objective) -> float:
    """Returns what a session costs relative to what its target ships in fp32; small gains do not count."""
    if prepared.measured is None or prepared.plan.parent is None or prepared.plan.is_bucket:
        return 1.0
    costs = _costs(prepared, objective)
    if PARENT not in costs:
        return math.inf
    own = _costs(base, objective)
    shipped = own[base.shipped] / own[PREPARED] if own else 1.0
    ratio = costs[PREPARED] / costs[PARENT] / shipped
    return ratio if ratio * STEADY_ALLOWANCE < 1 else max(ratio, math.nextafter(1.0, 2.0))


def _costs(prepared: PreparedVariant, objective: Objective) -> dict[str, float]:
    """Returns what a session costs by each plan that was measured, the page cache warm."""
    plans = prepared.measured.measurements[0].plans if prepared.measured else ()
    return {
        one.plan: one.ready_ms.median + (objective.runs_per_load - 1) * one.steady_ms.median
        for one in plans
        if one.ready_ms is not None
    }


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


def _read_measured(context: Context, variant: str) -> MeasureResult | None:
    measured = context.upstream.get(TaskId("measure", variant))
    return decode(MeasureResult, measured.result) if measured else None


def _read_fallback(context: Context) -> MeasureResult | None:
    """Returns what the portable variant costs beside the source, as the task of `cpu` measured both."""
    measured = _read_measured(context, "cpu")
    if measured is None or measured.fallback is None:
        return None
    records = tuple(
        replace(one, plans=tuple(plan for plan in one.plans if plan.plan in (DEFAULT, PORTABLE)), skipped={})
        for one in measured.measurements
    )
    return MeasureResult(records, measured.fallback)


def _collect(context: Context, variant: str) -> PreparedVariant:
    verified = context.upstream[TaskId("verify", variant)]
    optimized, folder = read_prepared(context, variant)
    return PreparedVariant(
        plan=context.plan.variant_plans[variant],
        optimized=optimized,
        verified=decode(VerifyResult, verified.result),
        measured=_read_fallback(context) if variant == PORTABLE else _read_measured(context, variant),
        tuned=read_tuned(context, variant),
        folder=folder,
        verified_folder=verified.folder,
        conversion=_conversion(context, variant),
    )
