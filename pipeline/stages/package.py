"""The last stage: manifest, loader config, golden sample, in one folder that appears in one rename."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pipeline
from pipeline.bundle.codec import decode
from pipeline.bundle.conversion_record import ConversionRecord, LeftOut
from pipeline.bundle.digest import DigestCache, digest_json
from pipeline.bundle.linking import link_or_copy, share_model
from pipeline.bundle.loader_config import (
    LOADER_SCHEMA_VERSION,
    FileEntry,
    Golden,
    LoaderConfig,
    Requirements,
    Tolerance,
    Variant,
    write_loader_config,
)
from pipeline.bundle.manifest import (
    MANIFEST_SCHEMA_VERSION,
    Manifest,
    MissingTarget,
    VariantRecord,
    write_manifest,
)
from pipeline.bundle.verification import check_bundle, describe_files
from pipeline.errors import BundleError, ChildError, LoadError, StageError
from pipeline.runtime.checking import check_variants
from pipeline.runtime.child import run_child
from pipeline.spec.models import ModelSpec
from pipeline.spec.resolution import resolved_spec
from pipeline.stages.commit import read_git_state
from pipeline.stages.contract import LEFT_OUT, PORTABLE, Context, Plan, TaskId
from pipeline.stages.measure.contenders import PARENT, PREPARED
from pipeline.stages.measure.decision import DEFAULT, STEADY_ALLOWANCE
from pipeline.stages.optimize.requirements import with_options
from pipeline.stages.optimize.session_plans import loading_options, loading_providers
from pipeline.stages.prepared import prepared_task, read_prepared, read_tuned
from pipeline.stages.results import FetchResult, MeasureResult, OptimizeResult, TuneResult, VerifyResult
from pipeline.stages.sources import FETCH, read_fetched, source_task
from pipeline.stages.variants import SOURCE_PRECISION, VariantPlan
from pipeline.stages.verify.golden import GOLDEN_FILE
from pipeline.stages.verify.reference import reference_variant
from pipeline.tuning.objective import Objective, objective_of


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """All that earlier stages found out about one variant."""

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
        return self.plan.name

    @property
    def precision(self) -> str:
        return SOURCE_PRECISION if self.conversion is None else self.conversion.precision

    @property
    def shipped(self) -> str:
        return self.measured.decision.shipped if self.measured else PREPARED


class Package:
    """Puts a bundle together."""

    name = "package"
    version = 2

    def variants(self, plan: Plan) -> tuple[str | None, ...]:  # noqa: ARG002
        """Returns `(None,)`: once per model."""
        return (None,)

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:  # noqa: ARG002
        """Returns every other task of the model."""
        return (
            *dict.fromkeys((FETCH, *(source_task(plan, v) for v in plan.variants))),
            *(prepared_task(plan, v) for v in plan.variants),
            *(TaskId("verify", v) for v in plan.variants),
            *(TaskId("measure", v) for v in plan.tuned_variants),
        )

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:  # noqa: ARG002
        """Returns the spec's digest and the targets left out."""
        return {
            "spec": digest_json(resolved_spec(plan.spec)),
            "missing": dict(plan.missing),
        }

    def run(self, context: Context) -> Mapping[str, Any]:
        """Writes the bundle.

        Raises:
            StageError: The disk is full or read-only.
        """
        fetched = read_fetched(context).description
        prepared = _in_order_of_preference(context)
        variants = tuple(
            _place(context, fetched, variant) for variant in prepared if variant.shipped != PORTABLE
        )
        golden = _place_golden(context)
        config = LoaderConfig(
            schema_version=LOADER_SCHEMA_VERSION,
            name=context.spec.name,
            inputs=fetched.interface.inputs,
            outputs=fetched.interface.outputs,
            golden=Golden(golden, *_tolerances(context.spec)),
            variants=variants,
        )
        write_loader_config(context.folder, config)
        write_manifest(context.folder, _manifest(context, fetched, prepared))
        return {"variants": [variant.name for variant in variants]}

    def ensures(self, context: Context, result: Mapping[str, Any]) -> None:
        """Checks the bundle as a reader would, and loads every variant that this machine can run.

        Raises:
            StageError: What was written cannot be read back, byte for byte, or a variant cannot be used.
        """
        try:
            check_bundle(context.folder, DigestCache().digest)
        except BundleError as error:
            raise StageError(f"the bundle cannot be read back\n  {error.message}") from error
        if PORTABLE not in result["variants"]:
            raise StageError("the bundle has no portable variant")
        _require_answers(context)


def _require_answers(context: Context) -> None:
    """Loads from where the files lie now: what was verified lay elsewhere, which may make a difference."""
    try:
        for checked in check_variants(context.folder, timeout_s=context.spec.optimize.timeout_s):
            if checked.reasons:
                context.say(str(checked))
    except (LoadError, ChildError) as error:
        raise StageError(f"the bundle cannot be used\n  {error.message}", hint=error.hint) from error


def _in_order_of_preference(context: Context) -> tuple[_Prepared, ...]:
    """Returns the variants there are: targets as the plan has them, the fastest precision of each first.

    Those for certain shapes only come last of their target; they are never taken but by their shapes.
    """
    plan = context.plan
    there = [_collect(context, name) for name in plan.variants if _why_left_out(context, name) is None]
    rank = {target: position for position, target in enumerate(plan.targets)}
    runs = objective_of(context.spec.tune)

    def preference(prepared: _Prepared) -> tuple[int, bool, float]:
        last = len(rank)
        position = last if prepared.name == PORTABLE else rank[prepared.plan.target]
        return position, prepared.plan.is_bucket, _relative_cost(prepared, runs)

    return tuple(sorted(there, key=preference))


def _relative_cost(prepared: _Prepared, objective: Objective) -> float:
    """Returns what a session costs relative to the target's fp32 one; a small gain does not count as one."""
    if prepared.measured is None or prepared.plan.parent is None or prepared.plan.is_bucket:
        return 1.0
    figures = {plan.plan: plan for plan in prepared.measured.measurements[0].plans}
    if PARENT not in figures:
        return math.inf
    costs = [
        figures[name].first_result_ms.median + (objective.runs_per_load - 1) * figures[name].steady_ms.median
        for name in (PREPARED, PARENT)
    ]
    ratio = costs[0] / costs[1]
    return ratio if ratio * STEADY_ALLOWANCE < 1 else max(ratio, math.nextafter(1.0, 2.0))


def _why_left_out(context: Context, variant: str) -> str | None:
    result = context.upstream[TaskId("verify", variant)].result
    return str(result[LEFT_OUT]) if LEFT_OUT in result else None


def _left_out(context: Context) -> tuple[LeftOut, ...]:
    reasons = {name: _why_left_out(context, name) for name in context.plan.variants}
    return tuple(
        LeftOut(name, reason, _conversion(context, name)) for name, reason in reasons.items() if reason
    )


def _conversion(context: Context, variant: str) -> ConversionRecord | None:
    task = source_task(context.plan, variant)
    record = None if task == FETCH else context.upstream[task].result.get("record")
    return None if record is None else decode(ConversionRecord, record)


def _collect(context: Context, variant: str) -> _Prepared:
    upstream = context.upstream
    measured = upstream.get(TaskId("measure", variant))
    verified = upstream[TaskId("verify", variant)]
    optimized, folder = read_prepared(context, variant)
    return _Prepared(
        plan=context.plan.variant_plans[variant],
        optimized=optimized,
        verified=decode(VerifyResult, verified.result),
        measured=decode(MeasureResult, measured.result) if measured else None,
        tuned=read_tuned(context, variant),
        folder=folder,
        verified_folder=verified.folder,
        conversion=_conversion(context, variant),
    )


def _place(context: Context, fetched: FetchResult, prepared: _Prepared) -> Variant:
    if prepared.shipped == DEFAULT:
        return _place_source(context, fetched, prepared)
    optimized = prepared.optimized
    files = _place_files(prepared.folder / optimized.model, context.folder, prepared.name)
    return Variant(
        name=prepared.name,
        target=prepared.plan.target,
        model=f"{prepared.name}/{optimized.model}",
        files=files,
        session_options=optimized.session_options,
        providers=optimized.providers,
        requirements=optimized.requirements,
        first_phase=prepared.tuned.first_phase if prepared.tuned else None,
        io_binding=prepared.tuned.io_binding if prepared.tuned else False,
        precision=prepared.precision,
        binding=prepared.plan.binding,
        bucket=prepared.plan.is_bucket,
        golden=_place_own_golden(context, prepared) if prepared.plan.is_converted else None,
    )


def _place_source(context: Context, fetched: FetchResult, prepared: _Prepared) -> Variant:
    """Ships the source, optimised at every load as by default: nothing prepared was faster."""
    source = read_fetched(context).path
    files = _place_files(source, context.folder, prepared.name)
    options = loading_options(context.spec.runtime, level="ORT_ENABLE_ALL")
    # What reads the portable graph reads the source: same opsets, no operator that the source does not have.
    portable = decode(OptimizeResult, context.upstream[TaskId("optimize", PORTABLE)].result).requirements
    providers = loading_providers(context.spec.runtime, prepared.plan.target)
    versions = with_options(
        portable.onnxruntime, options, providers, installed=prepared.optimized.onnxruntime
    )
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
    return tuple(dataclasses.replace(entry, path=f"{variant}/{entry.path}") for entry in placed)


def _place_golden(context: Context) -> FileEntry:
    verified = context.upstream[TaskId("verify", reference_variant(context.plan))]
    destination = context.folder / GOLDEN_FILE
    link_or_copy(verified.folder / GOLDEN_FILE, destination)
    return FileEntry(GOLDEN_FILE, destination.stat().st_size, DigestCache().digest(destination))


def _place_own_golden(context: Context, prepared: _Prepared) -> Golden:
    """Places a converted variant's own answers: those of the source are further away than a tolerance.

    Elsewhere it may differ from them by as much as it differs here from the source, and no more: another
    processor sums in another order, and rounds as coarsely.
    """
    name = f"{prepared.name}/{GOLDEN_FILE}"
    destination = context.folder / name
    link_or_copy(prepared.verified_folder / GOLDEN_FILE, destination)
    default, outputs = _tolerances(context.spec)
    if prepared.plan.has_own_precision:
        for accuracy in prepared.verified.accuracy:
            own = outputs.get(accuracy.output, default)
            outputs[accuracy.output] = Tolerance(own.rtol, max(own.atol, accuracy.max_abs))
    entry = FileEntry(name, destination.stat().st_size, DigestCache().digest(destination))
    return Golden(entry, default, outputs)


def _tolerances(spec: ModelSpec) -> tuple[Tolerance, dict[str, Tolerance]]:
    verify = spec.verify
    by_output = {name: Tolerance(own.rtol, own.atol) for name, own in verify.outputs.items()}
    return Tolerance(verify.rtol, verify.atol), by_output


def _manifest(context: Context, fetched: FetchResult, prepared: tuple[_Prepared, ...]) -> Manifest:
    return Manifest(
        schema_version=MANIFEST_SCHEMA_VERSION,
        name=context.spec.name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        pipeline_version=pipeline.__version__,
        spec_digest=digest_json(resolved_spec(context.spec)),
        source=fetched.source,
        environment=run_child("pipeline.stages.environment:describe_environment", {}, timeout_s=120).value,
        variants=tuple(_record(variant) for variant in prepared),
        files=describe_files(context.folder, DigestCache().digest),
        missing_targets=tuple(
            MissingTarget(target, reason) for target, reason in context.plan.missing.items()
        ),
        git=read_git_state(context.spec.folder),
        left_out=_left_out(context),
    )


def _record(prepared: _Prepared) -> VariantRecord:
    return VariantRecord(
        name=prepared.name,
        target=prepared.plan.target,
        level=prepared.optimized.step,
        ladder=prepared.optimized.ladder,
        verification=prepared.verified.record,
        measurements=prepared.measured.measurements if prepared.measured else (),
        decision=prepared.measured.decision if prepared.measured else None,
        tuning=prepared.tuned.record if prepared.tuned else None,
        conversion=prepared.conversion,
        accuracy=prepared.verified.accuracy,
    )
