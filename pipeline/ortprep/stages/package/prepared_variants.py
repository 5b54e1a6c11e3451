"""Results of earlier stages per variant, their order of preference, and their files in the bundle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ortprep.bundle.codec import decode
from ortprep.bundle.conversion_record import ConversionRecord, LeftOut
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.file_links import link_or_copy, share_model
from ortprep.bundle.loader_config import FileEntry, Golden, Requirements, Tolerance, Variant
from ortprep.bundle.verification import describe_files
from ortprep.stages.core.contract import LEFT_OUT, PORTABLE, Context, TaskId, VariantPlan
from ortprep.stages.core.results import FetchResult, MeasureResult, PreparedResult, VerifyResult
from ortprep.stages.core.sources import FETCH, read_fetched, read_prepared, source_task
from ortprep.stages.measure.contenders import PARENT, PREPARED
from ortprep.stages.measure.decision import DEFAULT, STEADY_ALLOWANCE
from ortprep.stages.optimize.requirements import with_options
from ortprep.stages.optimize.session_plans import loading_options, loading_providers
from ortprep.stages.verify.golden import GOLDEN_FILE, OWN_GOLDEN_FILE
from ortprep.stages.verify.reference import reference_variant
from ortprep.tuning.objective import Objective


@dataclass(frozen=True)
class PreparedVariant:
    """Results of earlier stages for one variant.

    Attributes:
        verified_folder: Folder of its own golden sample, if it has one.
    """

    plan: VariantPlan
    prepared: PreparedResult
    verified: VerifyResult
    measured: MeasureResult | None
    folder: Path
    verified_folder: Path
    conversion: ConversionRecord | None

    @property
    def name(self) -> str:
        """Its name in the bundle."""
        return self.plan.name

    @property
    def shipped(self) -> str:
        """Name of the plan that is shipped."""
        return self.measured.decision.shipped if self.measured else PREPARED


def collect_variants(context: Context) -> tuple[PreparedVariant, ...]:
    """Returns the variants there are, in the order that jobs prefer them in."""
    plan = context.plan
    there = [_collect(context, name) for name in plan.variants if _why_left_out(context, name) is None]
    return order_variants(there, plan.targets, Objective.of(context.spec.tune))


def order_variants(
    variants: Iterable[PreparedVariant], targets: Sequence[str], objective: Objective
) -> tuple[PreparedVariant, ...]:
    """Returns variants in order of preference: targets in order, of each the cheapest precision first.

    A CPU variant that costs more than fp32 comes after the portable variant. Buckets come last: only their
    shapes select them, and a reader that does not know them takes any other before.
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
        figures.plan: figures.ready_ms.median + (objective.runs_per_load - 1) * figures.steady_ms.median
        for figures in plans
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
        replace(
            record, plans=tuple(plan for plan in record.plans if plan.plan in (DEFAULT, PORTABLE)), skipped={}
        )
        for record in measured.measurements
    )
    return MeasureResult(records, measured.fallback)


def _collect(context: Context, variant: str) -> PreparedVariant:
    verified = context.upstream[TaskId("verify", variant)]
    prepared, folder = read_prepared(context, variant)
    return PreparedVariant(
        plan=context.plan.variant_plans[variant],
        prepared=prepared,
        verified=decode(VerifyResult, verified.result),
        measured=_read_fallback(context) if variant == PORTABLE else _read_measured(context, variant),
        folder=folder,
        verified_folder=verified.folder,
        conversion=_conversion(context, variant),
    )


def place_variant(context: Context, fetched: FetchResult, prepared: PreparedVariant) -> Variant:
    """Puts the files of a variant into the bundle, and returns how it is loaded.

    Raises:
        OSError: The disk is full.
    """
    if prepared.shipped == DEFAULT:
        return _place_source(context, fetched, prepared)
    variant = prepared.prepared.variant
    first = variant.first_phase
    if first is not None and first.model is not None:
        first = replace(first, model=f"{variant.name}/{first.model}")
    return replace(
        variant,
        model=f"{variant.name}/{variant.model}",
        files=_place_files(prepared.folder / variant.model, context.folder, variant.name),
        first_phase=first,
        golden=_place_own_golden(context, prepared) if prepared.plan.is_converted else None,
    )


def _place_source(context: Context, fetched: FetchResult, prepared: PreparedVariant) -> Variant:
    """Ships the source's graph, optimised at every load as by default: what was prepared was not better."""
    source = read_fetched(context).path
    files = _place_files(source, context.folder, prepared.name)
    options = loading_options(context.spec.runtime, level="ORT_ENABLE_ALL")
    # What reads the portable graph reads the source: same opsets, no operator that the source does not have.
    portable = read_prepared(context, PORTABLE)[0].variant.requirements
    providers = loading_providers(context.spec.runtime, prepared.plan.target)
    versions = with_options(portable.onnxruntime, options, providers, installed=prepared.prepared.onnxruntime)
    return Variant(
        name=prepared.name,
        target=prepared.plan.target,
        model=f"{prepared.name}/{fetched.model}",
        files=files,
        session_options=options,
        providers=providers,
        requirements=Requirements(versions, tuple(provider.name for provider in providers)),
    )


def _place_files(model: Path, bundle: Path, variant: str) -> tuple[FileEntry, ...]:
    share_model(model, bundle / variant / model.name)
    placed = describe_files(bundle / variant, DigestCache().digest)
    return tuple(replace(entry, path=f"{variant}/{entry.path}") for entry in placed)


def place_golden(context: Context) -> FileEntry:
    """Puts the source's golden sample into the bundle.

    Raises:
        OSError: The disk is full.
    """
    verified = context.upstream[TaskId("verify", reference_variant(context.plan))]
    destination = context.folder / GOLDEN_FILE
    link_or_copy(verified.folder / GOLDEN_FILE, destination)
    return FileEntry(GOLDEN_FILE, destination.stat().st_size, DigestCache().digest(destination))


def _place_own_golden(context: Context, prepared: PreparedVariant) -> Golden:
    """Places a golden sample that a converted variant takes.

    A variant in its own precision has its own answers. Elsewhere they may differ by as much as they differ
    here from the source, and no more: another processor sums in another order, and rounds as coarsely.
    """
    name = f"{prepared.name}/{GOLDEN_FILE}"
    destination = context.folder / name
    link_or_copy(prepared.verified_folder / OWN_GOLDEN_FILE, destination)
    tolerances = context.spec.verify.tolerances()
    if prepared.plan.has_own_precision:
        for accuracy in prepared.verified.accuracy:
            own = context.spec.verify.tolerance_of(accuracy.output)
            tolerances[accuracy.output] = Tolerance(own.rtol, max(own.atol, accuracy.max_abs))
    entry = FileEntry(name, destination.stat().st_size, DigestCache().digest(destination))
    return Golden(entry, tolerances.pop(""), tolerances)
