"""Which variants a spec asks for: per target the source's precision, others, and shape buckets. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from pipeline.spec.conversion import Convert, Precision

PORTABLE = "portable"
"""The variant every bundle carries: operators of ONNX and of the source only, for any machine."""

SOURCE_PRECISION = "fp32"
"""Precision of a variant that is not converted: whatever the source has."""

_LONGEST_LABEL = 64
_PRECISIONS = get_args(Precision)


@dataclass(frozen=True)
class VariantPlan:
    """What one variant is.

    Attributes:
        name: Unique in the bundle: `cpu`, `cuda-fp16`, `cpu-int8-batch8`, `portable`, ….
        target: What it runs on: `cpu` or `cuda`.
        precision: What is asked for: `fp32` (as the source), `fp16`, `bf16`, `mixed`, `int8` or `int4`.
        binding: Sizes its symbolic dimensions are bound to, by name.
        is_bucket: Whether it is there for batches of just these sizes.
        parent: The variant whose graph it is converted from, None for the source's.
        is_converted: Whether its graph is another than its parent's.
    """

    name: str
    target: str
    precision: str = SOURCE_PRECISION
    binding: Mapping[str, int] = field(default_factory=dict)
    is_bucket: bool = False
    parent: str | None = None
    is_converted: bool = False

    @property
    def has_own_precision(self) -> bool:
        """Whether it is in another precision than the source, so that a gate judges its answers."""
        return self.precision != SOURCE_PRECISION


def plan_variants(convert: Convert | None, targets: tuple[str, ...]) -> Iterator[VariantPlan]:
    """Yields the variants of every target, and the portable one, each after its parent.

    Args:
        convert: The spec's section, None for none.
        targets: What is built for, in order of preference.
    """
    for target in targets:
        yield from _variants_of(convert, target)
    yield VariantPlan(PORTABLE, "cpu")


def _variants_of(convert: Convert | None, target: str) -> Iterator[VariantPlan]:
    if convert is None:
        yield VariantPlan(target, target)
        return
    changed = convert.fusion is not None or bool(convert.binding)
    base = VariantPlan(target, target, binding=convert.binding, is_converted=changed)
    own = [
        replace(base, name=f"{target}-{precision}", precision=precision, parent=target, is_converted=True)
        for precision in convert.precisions(target)
    ]
    for variant in (base, *own):
        yield variant
        for label, bucket in _labelled(convert.buckets):
            yield replace(
                variant,
                name=f"{variant.name}-{label}",
                binding=bucket,
                is_bucket=True,
                parent=variant.name,
                is_converted=True,
            )


def _labelled(buckets: tuple[Mapping[str, int], ...]) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yields every bucket with a name that is part of a path: its sizes, or its number where that is long."""
    labels = [
        "-".join(f"{re.sub('[^A-Za-z0-9]+', '_', name).strip('_')}{size}" for name, size in bucket.items())
        for bucket in buckets
    ]
    for index, (label, bucket) in enumerate(zip(labels, buckets, strict=True)):
        usable = len(label) <= _LONGEST_LABEL and labels.count(label) == 1 and label not in _PRECISIONS
        # No label of sizes ends so: each part of one has its size at its end.
        yield label if usable else f"bucket-{index}", bucket
