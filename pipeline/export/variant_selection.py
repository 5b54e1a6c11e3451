"""Which variants of a bundle are exported: a function of values, with reasons.

`load` compares a variant's requirements with the machine it is on. A server that reads an export does not, so
what is not known to fit is not exported unless it is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortprep.bundle.loader_config import LoaderConfig, Requirements, Variant, find_variant
from ortprep.errors import ExportError
from ortprep.export.requirements import describe_processor, describe_versions
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


def choose_one(config: LoaderConfig, options: ExportOptions, server: Server) -> VariantChoice:
    """Returns the variants that were named, or else the first that is known to fit.

    Raises:
        ExportError: A name is not a variant's, a named variant does not fit what is known of the server, or
            nothing is known to fit.
    """
    if options.variants:
        return _named(config, options.variants, server)
    passed_over: list[PassedOver] = []
    for variant in _serving(config, options):
        objections = _objections(variant, options, server)
        if not objections:
            return VariantChoice((variant,), tuple(passed_over))
        passed_over.append(PassedOver(variant.name, objections))
    raise _nothing_fits(config, options, passed_over)


def choose_per_provider(config: LoaderConfig, options: ExportOptions, server: Server) -> VariantChoice:
    """Returns the variants that were named, or else for every execution provider the first known to fit.

    Args, errors: As `choose_one`, but for GPUs that nothing is known of: the reader of the export looks for a
    variant of the provider it has.
    """
    if options.variants:
        return _named(config, options.variants, server)
    taken: dict[str, Variant] = {}
    passed_over: list[PassedOver] = []
    for variant in _serving(config, options):
        preferred = variant.providers[0].name
        asked = dataclasses.replace(options, target=options.target or variant.target)
        objections = _objections(variant, asked, server)
        if preferred in taken:
            objections = (f"expected one variant for {preferred}, got {taken[preferred].name} before it",)
        if objections:
            passed_over.append(PassedOver(variant.name, objections))
        else:
            taken[preferred] = variant
    if not taken:
        raise _nothing_fits(config, options, passed_over)
    return VariantChoice(tuple(taken.values()), tuple(passed_over))


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
    found = []
    for name in dict.fromkeys(names):
        variant = find_variant(config, name)
        if variant is None:
            known = ", ".join(one.name for one in config.variants)
            raise ExportError(f"no such variant of {config.name}: {name!r}\n  expected one of {known}")
        against = contradictions(variant, server)
        if against:
            lines = "\n".join(f"  {one}" for one in against)
            raise ExportError(f"variant {name!r} of {config.name} does not fit the server\n{lines}")
        found.append(variant)
    return VariantChoice(tuple(found))


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
        hint = f"ortprep prepare {config.name}   (its spec says targets and precisions)"
        known = ", ".join(f"{one.name} ({one.target}, {one.precision})" for one in config.variants)
        wanted = f"target {options.target or 'any'}, precision {options.precision}"
        lines = f"  expected {wanted}, got {known}"
    return ExportError(f"no variant of {config.name} is known to fit the server\n{lines}", hint=hint)
