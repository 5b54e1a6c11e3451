"""Selection of a bundle's variants for an export, with reasons. Pure.

`load` compares a variant's requirements with the machine it is on. A server that reads an export does not, so
what is not known to fit is not exported unless it is named.
"""

from __future__ import annotations

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
class ExportRequest:
    """The variants to export, and what is known of their server.

    Attributes:
        variants: Names of variants; empty for a choice.
        target: `cpu` or `cuda`, None for any.
        precision: One of `ortprep.runtime.loading.variant_selection.PRECISIONS`, or `FASTEST` for any.
        onnxruntime: The server's version of ONNX Runtime, None if it is not known.
        hardware: The server's processor and GPUs, None if they are not known.
        name: Name of the model, None for the bundle's. Several variants of a bundle are NAME-VARIANT.
        instances: Number of instances on the processor, or on each GPU.
        max_batch_size: Largest batch that Triton may form; 0 leaves requests as they are.
    """

    variants: tuple[str, ...] = ()
    target: str | None = None
    precision: str = FASTEST
    onnxruntime: str | None = None
    hardware: Hardware | None = None
    name: str | None = None
    instances: int = 1
    max_batch_size: int = 0


def choose_variants(
    config: LoaderConfig, request: ExportRequest
) -> tuple[tuple[Variant, ...], tuple[PassedOver, ...]]:
    """Returns the variants that were named, or else the first that is known to fit, and those before it.

    Raises:
        ExportError: A name is not a variant's, a named variant does not fit what is known of the server, or
            nothing is known to fit.
    """
    if request.variants:
        return _named(config, request), ()
    passed_over: list[PassedOver] = []
    for variant in config.variants:
        if not serves(variant, request.target, request.precision):
            continue
        objections = (*contradictions(variant, request), *_doubts(variant.requirements, request))
        if not objections:
            return (variant,), tuple(passed_over)
        passed_over.append(PassedOver(variant.name, objections))
    raise _nothing_fits(config, request, passed_over)


def contradictions(variant: Variant, request: ExportRequest) -> tuple[str, ...]:
    """Returns everything that is known of a server and speaks against a variant."""
    if request.hardware is None:
        anywhere = Requirements(variant.requirements.onnxruntime, ())
        variant = variant._replace(requirements=anywhere)
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


def _doubts(needs: Requirements, request: ExportRequest) -> Iterator[str]:
    """Yields what a variant needs and nothing is known of."""
    if request.onnxruntime is None and needs.onnxruntime.below is not None:
        yield f"expected {describe_versions(needs.onnxruntime)}, got a server of unknown version"
    if request.hardware is not None:
        return
    if (processor := describe_processor(needs)) is not None:
        yield f"expected {processor}, got an unknown one"
    if needs_gpu(needs) and request.target is None:
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
