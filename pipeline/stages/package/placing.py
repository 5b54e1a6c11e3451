"""Where a variant's files and its golden sample come to lie, and what `loader.json` says of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pipeline.bundle.codec import decode
from pipeline.bundle.digest import DigestCache
from pipeline.bundle.linking import link_or_copy, share_model
from pipeline.bundle.loader_config import FileEntry, FirstPhase, Golden, Requirements, Tolerance, Variant
from pipeline.bundle.verification import describe_files
from pipeline.spec.models import ModelSpec
from pipeline.stages.contract import PORTABLE, Context, TaskId
from pipeline.stages.measure.decision import DEFAULT
from pipeline.stages.optimize.requirements import with_options
from pipeline.stages.optimize.session_plans import loading_options, loading_providers
from pipeline.stages.package.collecting import PreparedVariant
from pipeline.stages.results import FetchResult, OptimizeResult
from pipeline.stages.sources import read_fetched
from pipeline.stages.verify.golden import GOLDEN_FILE, OWN_GOLDEN_FILE
from pipeline.stages.verify.reference import reference_variant


def place_variant(context: Context, fetched: FetchResult, prepared: PreparedVariant) -> Variant:
    """Puts the files of a variant into the bundle, and returns how it is loaded.

    Args:
        context: The task; files go below its folder.
        fetched: The source.
        prepared: The variant, which ships its own plan or the default one.

    Raises:
        OSError: The disk is full.
    """
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
        first_phase=_first_phase(prepared),
        io_binding=prepared.tuned.io_binding if prepared.tuned else False,
        precision=prepared.precision,
        binding=prepared.plan.binding,
        bucket=prepared.plan.is_bucket,
        half_io=_takes_half(context.spec, prepared.precision),
        golden=_place_own_golden(context, prepared) if prepared.plan.is_converted else None,
    )


def _first_phase(prepared: PreparedVariant) -> FirstPhase | None:
    first = prepared.tuned.first_phase if prepared.tuned else None
    if first is None or first.model is None:
        return first
    return dataclasses.replace(first, model=f"{prepared.name}/{first.model}")


def _takes_half(spec: ModelSpec, precision: str) -> bool:
    convert = spec.convert
    return convert is not None and not convert.half.keep_io and precision in ("fp16", "mixed")


def _place_source(context: Context, fetched: FetchResult, prepared: PreparedVariant) -> Variant:
    """Ships the source's graph, optimised at every load as by default: what was prepared was not better."""
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

    One in another precision than the source's has answers of its own. Elsewhere it may differ from them by as
    much as it differs here from the source, and no more: another processor sums in another order, and rounds
    as coarsely.
    """
    name = f"{prepared.name}/{GOLDEN_FILE}"
    destination = context.folder / name
    link_or_copy(prepared.verified_folder / OWN_GOLDEN_FILE, destination)
    default, outputs = tolerances_of(context.spec)
    if prepared.plan.has_own_precision:
        for accuracy in prepared.verified.accuracy:
            whole = accuracy.output.partition("[")[0]
            own = outputs.get(accuracy.output) or outputs.get(whole) or default
            outputs[accuracy.output] = Tolerance(own.rtol, max(own.atol, accuracy.max_abs))
    entry = FileEntry(name, destination.stat().st_size, DigestCache().digest(destination))
    return Golden(entry, default, outputs)


def tolerances_of(spec: ModelSpec) -> tuple[Tolerance, dict[str, Tolerance]]:
    """Returns a spec's tolerance, and those of outputs that have one of their own."""
    verify = spec.verify
    by_output = {name: Tolerance(own.rtol, own.atol) for name, own in verify.outputs.items()}
    return Tolerance(verify.rtol, verify.atol), by_output
