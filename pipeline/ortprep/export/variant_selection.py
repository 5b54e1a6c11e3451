"""Selection of a bundle's variants for an export, and what each needs of its server. Pure.

`load` compares a variant's requirements with the machine it is on. A server that reads an export does not, so
what does not run everywhere is not exported unless it is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ortprep.bundle.loader_config import LoaderConfig, Requirements, Variant, VersionRange, find_variant
from ortprep.errors import ExportError
from ortprep.runtime.loading.variant_selection import needs_gpu


@dataclass(frozen=True)
class ExportRequest:
    """The variants to export, and settings of their server.

    Attributes:
        variants: Names of variants; empty for the first that any server can run.
        name: Name of the model, None for the bundle's. Several variants of a bundle are NAME-VARIANT.
        instances: Number of instances on the processor, or on each GPU.
        max_batch_size: Largest batch that Triton may form; 0 leaves requests as they are.
    """

    variants: tuple[str, ...] = ()
    name: str | None = None
    instances: int = 1
    max_batch_size: int = 0


def choose_variants(config: LoaderConfig, names: tuple[str, ...]) -> tuple[Variant, ...]:
    """Returns the variants that were named, or else the first that any processor can run.

    Raises:
        ExportError: A name is not a variant's, or nothing was named and no variant runs everywhere.
    """
    listed = ", ".join(one.name for one in config.variants)
    if not names:
        for variant in config.variants:
            if not variant.bucket and _runs_anywhere(variant.requirements):
                return (variant,)
        raise ExportError(
            f"no variant of {config.name} runs on every server\n  expected the name of one of {listed}",
            hint="--variant NAME; its needs are listed",
        )
    chosen = {name: find_variant(config, name) for name in names}
    for name, found in chosen.items():
        if found is None:
            raise ExportError(f"no such variant of {config.name}: {name!r}\n  expected one of {listed}")
    return tuple(filter(None, chosen.values()))


def _runs_anywhere(needs: Requirements) -> bool:
    return needs.onnxruntime.below is None and describe_processor(needs) is None and not needs_gpu(needs)


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
