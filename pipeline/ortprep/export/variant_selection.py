"""Selection of a bundle's variants for an export, with reasons. Pure.

`load` compares a variant's requirements with the machine it is on. A server that reads an export does not, so
what is not known to fit is not exported unless it is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ortprep.bundle.loader_config import LoaderConfig, Requirements, Variant, VersionRange, find_variant
from ortprep.errors import ExportError
from ortprep.export.result import ExportRequest
from ortprep.quoting import quoted
from ortprep.runtime.loading.variant_selection import Machine, PassedOver, find_reasons, needs_gpu, serves
from ortprep.runtime.machine.hardware import Hardware

Choice = tuple[tuple[Variant, ...], tuple[PassedOver, ...]]
"""The variants that are exported, and those that were not taken though they serve the target."""

_NO_HARDWARE = Hardware("", "", (), 0, 0)


def choose_variants(config: LoaderConfig, request: ExportRequest, *, per_provider: bool = False) -> Choice:
    """Returns the variants that were named, or else the first that is known to fit.

    Args:
        config: The bundle's loader config.
        request: Names of variants, and known facts of the server.
        per_provider: Whether to take the first of every execution provider. A GPU is then taken to be there:
            the reader of the export looks for a variant of the provider it has.

    Raises:
        ExportError: A name is not a variant's, a named variant does not fit what is known of the server, or
            nothing is known to fit.
    """
    if request.variants:
        return _named(config, request), ()
    chosen: dict[str, Variant] = {}
    passed_over: list[PassedOver] = []
    for variant in config.variants:
        if not serves(variant, request.target, request.precision):
            continue
        provider = variant.providers[0].name if per_provider else ""
        if provider in chosen and not per_provider:
            break
        objections: tuple[str, ...]
        if provider in chosen:
            objections = (f"expected one variant for {provider}, got {chosen[provider].name} before it",)
        else:
            is_gpu_known = request.target is not None or per_provider
            objections = (
                *contradictions(variant, request),
                *_doubts(variant.requirements, request, is_gpu_known=is_gpu_known),
            )
        if objections:
            passed_over.append(PassedOver(variant.name, objections))
        else:
            chosen[provider] = variant
    if not chosen:
        raise _nothing_fits(config, request, passed_over)
    return tuple(chosen.values()), tuple(passed_over)


def contradictions(variant: Variant, request: ExportRequest) -> tuple[str, ...]:
    """Returns everything that is known of a server and speaks against a variant."""
    if request.hardware is None:
        anywhere = Requirements(variant.requirements.onnxruntime, ())
        variant = dataclasses.replace(variant, requirements=anywhere)
    return find_reasons(variant, Machine(request.hardware or _NO_HARDWARE, request.onnxruntime))


def _named(config: LoaderConfig, request: ExportRequest) -> tuple[Variant, ...]:
    """Returns the variants that were named, each once; raises if one does not exist or does not fit."""
    variants = []
    for name in dict.fromkeys(request.variants):
        variant = find_variant(config, name)
        if variant is None:
            known = ", ".join(one.name for one in config.variants)
            raise ExportError(f"no such variant of {config.name}: {name!r}\n  expected one of {known}")
        if objections := contradictions(variant, request):
            lines = "\n".join(f"  {one}" for one in objections)
            raise ExportError(f"variant {name!r} of {config.name} does not fit the server\n{lines}")
        variants.append(variant)
    return tuple(variants)


def _doubts(needs: Requirements, request: ExportRequest, *, is_gpu_known: bool) -> Iterator[str]:
    """Yields what a variant needs and nothing is known of."""
    if request.onnxruntime is None and needs.onnxruntime.below is not None:
        yield f"expected {describe_versions(needs.onnxruntime)}, got a server of unknown version"
    if request.hardware is not None:
        return
    if (processor := describe_processor(needs)) is not None:
        yield f"expected {processor}, got an unknown one"
    if needs_gpu(needs) and not is_gpu_known:
        yield "expected a GPU, got an unknown machine"


def _nothing_fits(
    config: LoaderConfig, request: ExportRequest, passed_over: Sequence[PassedOver]
) -> ExportError:
    """Returns the error for a bundle without a variant for a server, with the way out."""
    lines = "\n".join(f"  {one}" for one in passed_over)
    hint = "say what the server has with --onnxruntime VERSION and --here, or name one with --variant NAME"
    if not passed_over:
        hint = f"ortprep prepare {quoted(config.name)}   (its spec says targets and precisions)"
        known = ", ".join(f"{one.name} ({one.target}, {one.precision})" for one in config.variants)
        lines = f"  expected target {request.target or 'any'}, precision {request.precision}, got {known}"
    return ExportError(f"no variant of {config.name} is known to fit the server\n{lines}", hint=hint)


def describe_versions(versions: VersionRange) -> str:
    """Returns a range of versions of ONNX Runtime in words."""
    upper = "" if versions.below is None else f" and < {versions.below}"
    return f"ONNX Runtime >= {versions.minimum}{upper}"


def describe_processor(needs: Requirements) -> str | None:
    """Returns in words what a processor must have and must not have, None if any will do."""
    if needs.machine is None and not needs.cpu_features and not needs.cpu_features_absent:
        return None
    words = "a processor" if needs.machine is None else f"a processor of kind {needs.machine}"
    words += f" with {', '.join(needs.cpu_features)}" if needs.cpu_features else ""
    return words + (f", without {', '.join(needs.cpu_features_absent)}" if needs.cpu_features_absent else "")


def describe_needs(variant: Variant) -> Iterator[str]:
    """Yields what a server must have, and its callers must do, for a variant to answer as recorded."""
    needs = variant.requirements
    yield describe_versions(needs.onnxruntime)
    if (processor := describe_processor(needs)) is not None:
        yield f"{processor}; elsewhere it may fail in its first run, or silently give wrong answers"
    if needs.compute_capability is not None:
        bounds = needs.compute_capability.minimum, needs.compute_capability.below
        low, below = (".".join(map(str, one)) for one in bounds)
        yield f"a GPU of compute capability >= {low} and < {below}"
    if variant.binding:
        sizes = ", ".join(f"{name}={size}" for name, size in variant.binding.items())
        yield f"inputs of these sizes only: {sizes}"
    if variant.half_io:
        yield "float16 where the bundle lists float32 inputs and outputs"
