"""What an exported variant needs of the machine that serves it, in sentences: nothing there checks it."""

from __future__ import annotations

from collections.abc import Iterator

from ortprep.bundle.loader_config import Requirements, Variant, VersionRange


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
