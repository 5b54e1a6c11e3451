"""Manifests, searches and pools as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ortprep.bundle.conversion_record import ConversionRecord
from ortprep.bundle.environment import pin_onnxruntime
from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.loader_config import LoaderConfig
from ortprep.bundle.manifest import (
    Manifest,
    VariantRecord,
    VerificationRecord,
    sum_folders,
)
from ortprep.measuring.shipped import count_inputs, shipped_figures
from ortprep.report.trials import describe_choice, describe_first_phase, find_chosen
from ortprep.report.variant_sections import MEANINGS, describe_conversion
from ortprep.tables import Cell, CellValue, Table, count_of, fill_table, number_cell

if TYPE_CHECKING:
    from ortprep.runtime.placement import ModelLoad, Placement


LEGEND = "a ± b: the median, and half the distance between the quartiles; a [b–c]: the quartiles themselves"
"""What the figures of every table are."""

_MB = 2**20


def describe_figures(manifest: Manifest) -> Iterator[str]:
    """Yields the lines that explain the figures of a bundle: what each is, and what each plan is."""
    measured = [measurement for variant in manifest.variants for measurement in variant.measurements]
    if not measured:
        return
    yield LEGEND
    yield "ready: from the start of a job's process to its first result; steady: a later run"
    for plan in dict.fromkeys(plan.plan for measurement in measured for plan in measurement.plans):
        if plan in MEANINGS:
            yield f"{plan}: {MEANINGS[plan]}"


def build_variants_table(manifest: Manifest) -> Table:
    """Returns one row per variant: the size and cost of what is shipped, side by side."""
    sizes = sum_folders(manifest)

    def shapes(variant: VariantRecord) -> str:
        binding = {} if variant.conversion is None else variant.conversion.binding
        return " ".join(f"{name}={size}" for name, size in binding.items()) or "all shapes"

    def size_mb(variant: VariantRecord) -> float | None:
        return sizes[variant.name] / _MB if variant.name in sizes else None

    def cost(read: Callable[[PlanFigures], CellValue]) -> Callable[[VariantRecord], CellValue]:
        return lambda variant: None if (shipped := shipped_figures(variant)) is None else read(shipped)

    return fill_table(
        f"{manifest.name}: variants",
        manifest.variants,
        (
            ("variant", lambda variant: variant.name),
            ("for", shapes),
            ("size MB", size_mb),
            ("ready ms", cost(lambda plan: plan.ready_ms)),
            ("init ms", cost(lambda plan: plan.init_ms)),
            ("steady ms", cost(lambda plan: plan.steady_ms)),
            ("private MB", cost(lambda plan: plan.private_mb)),
        ),
    )


def build_accuracy_table(manifest: Manifest) -> Table:
    """Returns one row per converted variant: how near its answers are to the source's."""

    def precision(variant: VariantRecord) -> str:
        made = variant.conversion
        if made is None:
            return "fp32"
        stepped = "" if made.asked == made.precision else f" (instead of {made.asked})"
        return f"{made.precision}{stepped}"

    def top1(variant: VariantRecord) -> Cell | None:
        found = [output.top1 for output in variant.accuracy if output.top1 is not None]
        return number_cell(min(found), f"{min(found):.3f}") if found else None

    def worst(variant: VariantRecord, name: str, digits: int) -> Cell:
        value = min(getattr(output, name) for output in variant.accuracy)
        return number_cell(value, f"{value:.{digits}f}")

    return fill_table(
        f"{manifest.name}: the worst output of each converted variant, against the source",
        [variant for variant in manifest.variants if variant.accuracy],
        (
            ("variant", lambda variant: variant.name),
            ("precision", precision),
            ("SNR dB", lambda variant: worst(variant, "snr_db", 1)),
            ("cosine", lambda variant: worst(variant, "cosine", 5)),
            ("top-1", top1),
        ),
    )


def _describe_conversion(conversion: ConversionRecord) -> Iterator[str]:
    """Yields what was fused, bound and converted, and how each step went, one line each."""
    yield from (f"  {line}" for line in describe_conversion(conversion))
    for step in conversion.steps:
        outcome = step.outcome.splitlines()[0]
        unconverted = f"; {len(step.kept)} of {step.nodes} nodes left in fp32" if step.kept else ""
        trials = f" after {step.trials} trials" if step.trials else ""
        yield f"  {step.precision}: {outcome}{unconverted}{trials}"


def describe_variant(variant: VariantRecord) -> list[str]:
    """Returns the lines that say how a variant was made."""
    verification = variant.verification
    steps = " → ".join(attempt.step for attempt in variant.ladder)
    lines = [f"{variant.name}: level {variant.level} (ladder: {steps})"]
    if variant.conversion is not None:
        lines += _describe_conversion(variant.conversion)
    if variant.accuracy:
        lines.append(f"  passed its gate on {count_inputs(verification)}")
    else:
        lines.append(_describe_verification(verification))
    if variant.tuning is not None:
        tuning = variant.tuning
        # How it compares with the default is the decision's to say: one comparison, of what is shipped.
        choice = find_chosen(tuning)
        summary = f": {describe_choice(tuning, choice)}" if choice else ""
        lines.append(
            f"  tuned: {count_of(len(tuning.trials), 'plan')} tried, trial {tuning.chosen} prepared{summary}"
        )
        if tuning.first_phase is not None:
            lines.append(f"  {describe_first_phase(tuning)}")
    if variant.decision is not None:
        lines.append(f"  ships {variant.decision.shipped}: {variant.decision.reason}")
    return lines


def _describe_verification(verification: VerificationRecord) -> str:
    worst = max((error.ratio for error in verification.errors), default=0.0)
    noise = max((error.ratio for error in verification.noise_floor), default=0.0)
    rounding = ", which rounding may exceed" if noise > 1 else ""
    return (
        f"  verified on {count_inputs(verification)}: worst error {worst:.2g} of its tolerance{rounding}, "
        f"noise floor {noise:.2g}"
    )


def describe_bundle(manifest: Manifest) -> list[str]:
    """Returns the lines above the tables."""
    size_mb = sum(entry.size_bytes for entry in manifest.files) / 2**20
    lines = [
        f"{manifest.name}: {size_mb:.1f} MB in {len(manifest.files)} files, made {manifest.created_at} "
        f"by ortprep {manifest.pipeline_version} with {pin_onnxruntime(manifest.environment)}",
        f"source: {manifest.source.kind} {manifest.source.location} ({manifest.source.sha256})",
    ]
    lines += [f"missing target {target}: {reason}" for target, reason in manifest.missing_targets.items()]
    for left_out in manifest.left_out:
        lines.append(f"left out {left_out.variant}: {left_out.reason}")
        lines += _describe_conversion(left_out.conversion) if left_out.conversion else []
    for variant in manifest.variants:
        lines += describe_variant(variant)
    return lines


def describe_interface(config: LoaderConfig) -> Iterator[str]:
    """Yields the lines that say which arrays a model takes and gives."""
    for what, tensors in (("input", config.inputs), ("output", config.outputs)):
        for tensor in tensors:
            sizes = "of any rank" if tensor.shape is None else f"[{', '.join(map(_size, tensor.shape))}]"
            yield f"{what} {tensor.name}: {tensor.dtype} {sizes}"


def _size(size: int | str | None) -> str:
    return "?" if size is None else str(size)


def build_placement_table(loads: Sequence[ModelLoad], placement: Placement) -> Table:
    """Returns one row per device: its models, the work of a round, and the memory they take."""
    costs = {load.name: load.cost_ms for load in loads}
    return fill_table(
        f"a round of one request per model takes at least {placement.makespan_ms:.3g} ms",
        placement.assignments,
        (
            ("device", lambda one: one.device),
            ("models", lambda one: ", ".join(f"{name} ({costs[name]:.3g} ms)" for name in one.models)),
            ("ms a round", lambda one: one.cost_ms),
            ("memory MB", lambda one: one.memory_bytes / _MB),
        ),
    )
