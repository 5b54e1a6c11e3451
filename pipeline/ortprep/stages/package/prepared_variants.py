"""Results of earlier stages per variant, their order of preference, and their files in the bundle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ortprep.bundle.codec import decode
from ortprep.bundle.conversion_record import ConversionRecord, LeftOut
from ortprep.bundle.file_links import link_or_copy, share_model
from ortprep.bundle.loader_config import FileEntry, Golden, Tolerance, Variant
from ortprep.bundle.manifest import Decision, MeasurementRecord, VariantRecord
from ortprep.bundle.verification import describe_file, describe_files
from ortprep.children.child import run_child
from ortprep.errors import ChildError
from ortprep.measuring.shipped import DEFAULT, PARENT, PREPARED, shipped_plan
from ortprep.stages.core.contract import LEFT_OUT, PORTABLE, Context, TaskId, VariantPlan
from ortprep.stages.core.results import (
    MeasureResult,
    PreparedResult,
    VerifyResult,
    read_prepared,
    source_task,
)
from ortprep.stages.measure.decision import STEADY_ALLOWANCE
from ortprep.stages.optimize.requirements import with_options
from ortprep.stages.optimize.session_plans import default_candidate
from ortprep.stages.package.shared_weights import SharingRequest, share_weights
from ortprep.stages.verify.golden_sample import GOLDEN_FILE, OWN_GOLDEN_FILE
from ortprep.stages.verify.reference import reference_variant
from ortprep.tuning.objective import Objective

MIN_AUTO_SPEEDUP = 1.1
"""How many times as fast as fp32 a variant of `precision: auto` has to be; less is not worth the risk.

A judge does not see a difference that is rarer than about three divided by its number of lines.
"""

_SHARED_BYTES = 1024 * 1024
"""Data files up to this size are not worth the second that it takes to look for their weights elsewhere."""

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PreparedVariant:
    """Results of earlier stages for one variant; `folder` has the files of `prepared`."""

    plan: VariantPlan
    prepared: PreparedResult
    folder: Path
    record: VariantRecord


def collect_variants(context: Context) -> tuple[tuple[PreparedVariant, ...], tuple[LeftOut, ...]]:
    """Returns the variants there are, in the order that jobs prefer them in, and those left out, with why."""
    there, left_out = [], []
    for name in context.plan.variants:
        reason = context.upstream[TaskId("verify", name)].result.get(LEFT_OUT)
        if reason is None:
            there.append(_collect(context, name))
        else:
            left_out.append(LeftOut(name, str(reason), _conversion(context, name)))
    objective = Objective.of(context.spec.tune)
    ordered = order_variants(there, context.plan.targets, objective)
    if context.spec.convert is not None and context.spec.convert.is_auto:
        slower = dict(find_slower(ordered, objective))
        left_out += [
            LeftOut(one.plan.name, slower[one.plan.name], one.record.conversion)
            for one in ordered
            if one.plan.name in slower
        ]
        ordered = tuple(one for one in ordered if one.plan.name not in slower)
    return ordered, tuple(left_out)


def find_slower(variants: Sequence[PreparedVariant], objective: Objective) -> Iterator[tuple[str, str]]:
    """Yields the variants in a precision of their own that gain too little over fp32, with their figures."""
    by_name = {one.plan.name: one for one in variants}
    for name, one in by_name.items():
        base = by_name[one.plan.target]
        is_own = one.plan.has_own_precision
        if is_own and _relative_cost(one, base, objective) * MIN_AUTO_SPEEDUP > 1:
            costs = _costs(one, objective)
            fp32 = _fp32_cost(costs, base, objective)
            figures = (
                f"fp32 {fp32:.4g} ms, prepared {costs[PREPARED]:.4g} ms" if fp32 else "it was not measured"
            )
            need = f"not {MIN_AUTO_SPEEDUP} times as fast as fp32 for {objective.runs_per_load} runs per load"
            yield name, f"{need}: {figures}"


def _collect(context: Context, name: str) -> PreparedVariant:
    """Returns what the stages found out about one variant."""
    plan = context.plan.variant_plans[name]
    prepared, folder = read_prepared(context, name)
    verified = decode(VerifyResult, context.upstream[TaskId("verify", name)].result)
    measurements, decision = _measured(context, name)
    record = VariantRecord(
        name=name,
        target=plan.target,
        level=prepared.step,
        ladder=prepared.attempts,
        verification=verified.record,
        measurements=measurements,
        decision=decision,
        tuning=prepared.record,
        # What was fused and is not shipped, since it was not faster, is no part of the variant.
        conversion=_conversion(context, name) if not decision or decision.shipped == PREPARED else None,
        accuracy=verified.accuracy,
    )
    return PreparedVariant(plan, prepared, folder, record)


def _conversion(context: Context, variant: str) -> ConversionRecord | None:
    record = context.upstream[source_task(context.plan, variant)].result.get("conversion")
    return None if record is None else decode(ConversionRecord, record)


def _measured(context: Context, variant: str) -> tuple[tuple[MeasurementRecord, ...], Decision | None]:
    """Returns what a variant costs and which plan it ships: nothing where it was not measured.

    The task of `cpu` measured the portable variant beside the source.
    """
    task = context.upstream.get(TaskId("measure", "cpu" if variant == PORTABLE else variant))
    if task is None:
        return (), None
    measured = decode(MeasureResult, task.result)
    if variant != PORTABLE:
        return measured.measurements, measured.decision
    if measured.fallback is None:
        return (), None
    both = (DEFAULT, PORTABLE)
    records = (
        replace(record, plans=tuple(plan for plan in record.plans if plan.plan in both))
        for record in measured.measurements
    )
    return tuple(records), measured.fallback


def order_variants(
    variants: Iterable[PreparedVariant], targets: Sequence[str], objective: Objective
) -> tuple[PreparedVariant, ...]:
    """Returns variants in order of preference: targets in order, of each the cheapest precision first.

    A CPU variant that costs more than fp32 comes after the portable variant.
    """
    by_name = {prepared.plan.name: prepared for prepared in variants}
    rank = {target: position for position, target in enumerate(targets)}
    portable = rank.get("cpu", len(rank)) + 1

    def preference(prepared: PreparedVariant) -> tuple[int, float]:
        target = prepared.plan.target
        if prepared.plan.name == PORTABLE:
            return portable, 0.0
        cost = _relative_cost(prepared, by_name[target], objective)
        return portable if target == "cpu" and cost > 1 else rank[target], cost

    return tuple(sorted(by_name.values(), key=preference))


def _relative_cost(prepared: PreparedVariant, base: PreparedVariant, objective: Objective) -> float:
    """Returns what a session costs relative to what its target ships in fp32; small gains do not count."""
    costs = _costs(prepared, objective)
    if not costs or prepared.plan.parent is None:
        return 1.0
    fp32 = _fp32_cost(costs, base, objective)
    ratio = costs[PREPARED] / fp32 if fp32 else math.inf
    return ratio if ratio * STEADY_ALLOWANCE < 1 else max(ratio, math.nextafter(1.0, 2.0))


def _fp32_cost(costs: Mapping[str, float], base: PreparedVariant, objective: Objective) -> float:
    """Returns the cost of the plan that ships in fp32, of the same rounds if it was there; 0 if unknown."""
    shipped, own = shipped_plan(base.record), _costs(base, objective)
    if shipped == DEFAULT and DEFAULT in costs:
        return costs[DEFAULT]
    return costs.get(PARENT, 0.0) * (own[shipped] / own[PREPARED] if own else 1.0)


def _costs(prepared: PreparedVariant, objective: Objective) -> dict[str, float]:
    """Returns what a session costs by each plan that was measured, the page cache warm."""
    measurements = prepared.record.measurements
    return {
        figures.plan: figures.ready_ms.median + (objective.runs_per_load - 1) * figures.steady_ms.median
        for figures in (measurements[0].plans if measurements else ())
    }


def place_variant(context: Context, prepared: PreparedVariant) -> Variant:
    """Puts the files of a variant into the bundle, and returns how it is loaded.

    Raises:
        OSError: The disk is full.
    """
    if shipped_plan(prepared.record) == DEFAULT:
        return _place_source(context, prepared)
    variant = prepared.prepared.variant
    convert = context.spec.convert
    return variant._replace(
        model=f"{variant.name}/{variant.model}",
        judged=prepared.plan.has_own_precision and convert is not None and convert.judge is not None,
        files=_place_files(prepared.folder / variant.model, context.folder, variant.name),
        golden=_place_own_golden(context, prepared) if prepared.plan.has_own_precision else None,
    )


def _place_source(context: Context, prepared: PreparedVariant) -> Variant:
    """Ships the source's graph, optimised at every load as by default: what was prepared was not better."""
    name, (folder, variant) = prepared.plan.name, default_candidate(context, prepared.plan)
    # What reads the portable graph reads the source: same opsets, no operator that the source does not have.
    portable = read_prepared(context, PORTABLE)[0].variant.requirements
    versions = with_options(
        portable.onnxruntime,
        variant.session_options,
        variant.providers,
        installed=prepared.prepared.onnxruntime,
    )
    return variant._replace(
        model=f"{name}/{variant.model}",
        files=_place_files(folder / variant.model, context.folder, name),
        requirements=variant.requirements._replace(onnxruntime=versions),
    )


def _place_files(model: Path, bundle: Path, variant: str) -> tuple[FileEntry, ...]:
    """Places a variant's files; of the portable one, another's data file if that has all of its weights."""
    place = bundle / variant / model.name
    data, others = model.with_name(f"{model.name}.data"), tuple(sorted(bundle.glob("*/*.onnx")))
    shared = None
    if variant == PORTABLE and others and data.is_file() and data.stat().st_size >= _SHARED_BYTES:
        with suppress(ChildError):  # a second copy does no harm
            request = SharingRequest(model, others, place)
            shared = run_child(share_weights, request, timeout_s=_TIMEOUT_S).value
    if shared is None:
        place.unlink(missing_ok=True)  # what a child that was killed has written
        share_model(model, place)
    else:
        link_or_copy(shared, place.with_name(shared.name))
    placed = describe_files(bundle / variant)
    return tuple(entry._replace(path=f"{variant}/{entry.path}") for entry in placed)


def place_golden(context: Context) -> Golden:
    """Puts the source's golden sample into the bundle.

    Raises:
        OSError: The disk is full.
    """
    entry = _place_file(context, reference_variant(context.plan), GOLDEN_FILE, GOLDEN_FILE)
    tolerances = _tolerances(context)
    return Golden(entry, tolerances.pop(""), tolerances)


def _place_own_golden(context: Context, prepared: PreparedVariant) -> Golden:
    """Places the golden sample of a variant in a precision of its own, with its own answers.

    Elsewhere they may differ by as much as they differ here from the source, and no more: another processor
    sums in another order, and rounds as coarsely.
    """
    name = prepared.plan.name
    entry = _place_file(context, name, OWN_GOLDEN_FILE, f"{name}/{GOLDEN_FILE}")
    tolerances = _tolerances(context)
    for accuracy in prepared.record.accuracy:
        own = tolerances.get(accuracy.output, tolerances[""])
        tolerances[accuracy.output] = Tolerance(own.rtol, max(own.atol, accuracy.max_abs))
    return Golden(entry, tolerances.pop(""), tolerances)


def _tolerances(context: Context) -> dict[str, Tolerance]:
    """Returns what `verify` tolerated, by output."""
    owner = TaskId("verify", reference_variant(context.plan))
    verified = decode(VerifyResult, context.upstream[owner].result)
    return context.spec.verify.tolerances(verified.record.noise_floor)


def _place_file(context: Context, variant: str, file: str, name: str) -> FileEntry:
    """Puts a file that `verify` left for a variant into the bundle."""
    destination = context.folder / name
    link_or_copy(context.upstream[TaskId("verify", variant)].folder / file, destination)
    return describe_file(destination, name)
