"""Which variants of a bundle are exported: a function of values, with reasons.

`load` compares a variant's requirements with the machine it is on. A server that reads an export does not, so
what is not known to fit is not exported unless it is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortprep.bundle.loader_config import LoaderConfig, Requirements, Variant, VersionRange, find_variant
from ortprep.errors import ExportError
from ortprep.quoting import quoted
from ortprep.runtime.loading.variant_selection import (
    FASTEST,
    Machine,
    PassedOver,
    find_reasons,
    needs_gpu,
    serves,
)
from ortprep.runtime.machine.hardware import Hardware

_NO_HARDWARE = Hardware("", "", (), 0, 0)


@dataclass(frozen=True)
class Server:
    """What is known of the machine that will serve an export.

    Attributes:
        onnxruntime: Its version of ONNX Runtime, None if that is not known.
        hardware: Its processor and GPUs, None if they are not known.
    """

    onnxruntime: str | None = None
    hardware: Hardware | None = None


@dataclass(frozen=True)
class ExportOptions:
    """What is asked for.

    Attributes:
        variants: Names; empty for a choice.
        target: `cpu` or `cuda`, None for whatever comes first.
        precision: One of `ortprep.runtime.loading.variant_selection.PRECISIONS`, or `FASTEST` for any.
    """

    variants: tuple[str, ...] = ()
    target: str | None = None
    precision: str = FASTEST


@dataclass(frozen=True)
class VariantChoice:
    """What is exported, and what was not taken though it serves the target, with reasons."""

    variants: tuple[Variant, ...]
    passed_over: tuple[PassedOver, ...] = ()


def choose_variants(
    config: LoaderConfig, options: ExportOptions, server: Server, *, per_provider: bool = False
) -> VariantChoice:
    """Returns the variants that were named, or else the first that is known to fit.

    Args:
        config: The bundle's loader config.
        options: What is asked for.
        server: What is known of the server.
        per_provider: Whether to take the first of every execution provider. A GPU is then taken to be there:
            the reader of the export looks for a variant of the provider it has.

    Raises:
        ExportError: A name is not a variant's, a named variant does not fit what is known of the server, or
            nothing is known to fit.
    """
    if options.variants:
        return _named(config, options.variants, server)
    chosen: dict[str, Variant] = {}
    passed_over: list[PassedOver] = []
    for variant in _serving(config, options):
        provider = variant.providers[0].name if per_provider else ""
        target = options.target or (variant.target if per_provider else None)
        objections = _objections(variant, dataclasses.replace(options, target=target), server)
        if provider in chosen:
            if not per_provider:
                break
            objections = (f"expected one variant for {provider}, got {chosen[provider].name} before it",)
        if objections:
            passed_over.append(PassedOver(variant.name, objections))
        else:
            chosen[provider] = variant
    if not chosen:
        raise _nothing_fits(config, options, passed_over)
    return VariantChoice(tuple(chosen.values()), tuple(passed_over))


def contradictions(variant: Variant, server: Server) -> tuple[str, ...]:
    """Returns everything that is known of a server and speaks against a variant."""
    known = variant
    if server.hardware is None:
        anywhere = Requirements(variant.requirements.onnxruntime, ())
        known = dataclasses.replace(variant, requirements=anywhere)
    return find_reasons(known, Machine(server.hardware or _NO_HARDWARE, server.onnxruntime))


def _serving(config: LoaderConfig, options: ExportOptions) -> tuple[Variant, ...]:
    return tuple(one for one in config.variants if serves(one, options.target, options.precision))


def _named(config: LoaderConfig, names: Sequence[str], server: Server) -> VariantChoice:
    variants = []
    for name in dict.fromkeys(names):
        variant = find_variant(config, name)
        if variant is None:
            known = ", ".join(one.name for one in config.variants)
            raise ExportError(f"no such variant of {config.name}: {name!r}\n  expected one of {known}")
        objections = contradictions(variant, server)
        if objections:
            lines = "\n".join(f"  {one}" for one in objections)
            raise ExportError(f"variant {name!r} of {config.name} does not fit the server\n{lines}")
        variants.append(variant)
    return VariantChoice(tuple(variants))


def _objections(variant: Variant, options: ExportOptions, server: Server) -> tuple[str, ...]:
    return (*contradictions(variant, server), *_doubts(variant, options, server))


def _doubts(variant: Variant, options: ExportOptions, server: Server) -> Iterator[str]:
    """Yields what a variant needs and nothing is known of."""
    needs = variant.requirements
    if server.onnxruntime is None and needs.onnxruntime.below is not None:
        yield f"expected {describe_versions(needs.onnxruntime)}, got a server of unknown version"
    if server.hardware is not None:
        return
    processor = describe_processor(needs)
    if processor is not None:
        yield f"expected {processor}, got an unknown one"
    if needs_gpu(needs) and options.target is None:
        yield "expected a GPU, got an unknown machine"


def _nothing_fits(
    config: LoaderConfig, options: ExportOptions, passed_over: Sequence[PassedOver]
) -> ExportError:
    lines = "\n".join(f"  {one}" for one in passed_over)
    hint = "say what the server has with --onnxruntime VERSION and --here, or name one with --variant NAME"
    if not passed_over:
        hint = f"ortprep prepare {quoted(config.name)}   (its spec says targets and precisions)"
        known = ", ".join(f"{one.name} ({one.target}, {one.precision})" for one in config.variants)
        request = f"target {options.target or 'any'}, precision {options.precision}"
        lines = f"  expected {request}, got {known}"
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
    processor = describe_processor(needs)
    if processor is not None:
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
