"""The last stage: manifest, loader config, golden sample, in one folder that appears in one rename."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pipeline
from pipeline.bundle.codec import decode
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
from pipeline.stages.contract import PORTABLE, Context, Plan, TaskId
from pipeline.stages.measure.contenders import PREPARED
from pipeline.stages.measure.decision import DEFAULT
from pipeline.stages.optimize.requirements import with_options
from pipeline.stages.optimize.session_plans import loading_options, loading_providers
from pipeline.stages.prepared import prepared_task, read_prepared, read_tuned
from pipeline.stages.results import FetchResult, MeasureResult, OptimizeResult, TuneResult, VerifyResult
from pipeline.stages.verify.golden import GOLDEN_FILE
from pipeline.stages.verify.reference import reference_variant


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """All that earlier stages found out about one variant."""

    name: str
    target: str
    optimized: OptimizeResult
    verified: VerifyResult
    measured: MeasureResult | None
    tuned: TuneResult | None
    folder: Path

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
            TaskId("fetch"),
            *(prepared_task(plan, v) for v in plan.variants),
            *(TaskId("verify", v) for v in plan.variants),
            *(TaskId("measure", t) for t in plan.targets),
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
        fetched = decode(FetchResult, context.upstream[TaskId("fetch")].result)
        prepared = tuple(_collect(context, name) for name in context.plan.variants)
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


def _collect(context: Context, variant: str) -> _Prepared:
    upstream = context.upstream
    measured = upstream.get(TaskId("measure", variant))
    optimized, folder = read_prepared(context, variant)
    return _Prepared(
        name=variant,
        target="cpu" if variant == PORTABLE else variant,
        optimized=optimized,
        verified=decode(VerifyResult, upstream[TaskId("verify", variant)].result),
        measured=decode(MeasureResult, measured.result) if measured else None,
        tuned=read_tuned(context, variant),
        folder=folder,
    )


def _place(context: Context, fetched: FetchResult, prepared: _Prepared) -> Variant:
    if prepared.shipped == DEFAULT:
        return _place_source(context, fetched, prepared)
    optimized = prepared.optimized
    files = _place_files(prepared.folder / optimized.model, context.folder, prepared.name)
    return Variant(
        name=prepared.name,
        target=prepared.target,
        model=f"{prepared.name}/{optimized.model}",
        files=files,
        session_options=optimized.session_options,
        providers=optimized.providers,
        requirements=optimized.requirements,
        first_phase=prepared.tuned.first_phase if prepared.tuned else None,
        io_binding=prepared.tuned.io_binding if prepared.tuned else False,
    )


def _place_source(context: Context, fetched: FetchResult, prepared: _Prepared) -> Variant:
    """Ships the source, optimised at every load as by default: nothing prepared was faster."""
    source = context.upstream[TaskId("fetch")].folder / fetched.model
    files = _place_files(source, context.folder, prepared.name)
    options = loading_options(context.spec.runtime, level="ORT_ENABLE_ALL")
    # What reads the portable graph reads the source: same opsets, no operator that the source does not have.
    portable = decode(OptimizeResult, context.upstream[TaskId("optimize", PORTABLE)].result).requirements
    providers = loading_providers(context.spec.runtime, prepared.name)
    versions = with_options(
        portable.onnxruntime, options, providers, installed=prepared.optimized.onnxruntime
    )
    return Variant(
        name=prepared.name,
        target=prepared.target,
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
    )


def _record(prepared: _Prepared) -> VariantRecord:
    return VariantRecord(
        name=prepared.name,
        target=prepared.target,
        level=prepared.optimized.step,
        ladder=prepared.optimized.ladder,
        verification=prepared.verified.record,
        measurements=prepared.measured.measurements if prepared.measured else (),
        decision=prepared.measured.decision if prepared.measured else None,
        tuning=prepared.tuned.record if prepared.tuned else None,
    )
