"""Manifests as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from pipeline.bundle.conversion_record import ConversionRecord
from pipeline.bundle.manifest import (
    Manifest,
    MeasurementRecord,
    PlanFigures,
    VariantRecord,
    VerificationRecord,
)
from pipeline.bundle.summary import Summary
from pipeline.bundle.tuning_record import FirstPhaseRecord
from pipeline.measuring.shipped import shipped_figures
from pipeline.report.trials import describe_choice
from pipeline.report.wording import count_of, format_ratio


def build_figures_table(measurement: MeasurementRecord, *, title: str) -> Table:
    """Returns one row per plan: medians, the distance between quartiles, and ratios to the default plan."""
    table = Table(title=f"{title}, {measurement.cache} cache, {measurement.shapes}")
    table.add_column("plan")
    for heading in (
        "ready ms",
        "init ms",
        "first run ms",
        "steady ms",
        "private MB",
        "peak MB",
        "GPU MB",
    ):
        table.add_column(heading, justify="right")
    table.add_column("sooner", justify="right")
    default = next((plan for plan in measurement.plans if plan.plan == "default"), None)
    for plan in measurement.plans:
        table.add_row(*_figures_row(plan, default))
    return table


def _figures_row(plan: PlanFigures, default: PlanFigures | None) -> tuple[str, ...]:
    sooner = format_ratio(default.result_ms.median / plan.result_ms.median) if default else ""
    summaries = (
        plan.ready_ms,
        plan.init_ms,
        plan.first_ms,
        plan.steady_ms,
        plan.private_mb,
        plan.peak_mb,
        plan.gpu_mb,
    )
    return (plan.plan, *(format_summary(summary) for summary in summaries), sooner)


def format_summary(summary: Summary | None) -> str:
    """Returns `median ± half the distance between quartiles`, or a dash where nothing was measured."""
    if summary is None:
        return "–"
    spread = (summary.p75 - summary.p25) / 2
    return f"{_figure(summary.median)} ± {_figure(spread)}"


def _figure(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def describe_first_phase(first: FirstPhaseRecord) -> str:
    """Returns the line that says what `load_progressive` starts with, and what both sessions take."""
    return (
        f"serves first (load_progressive): trial {first.trial}; "
        f"both sessions take about {first.overlap_mb:.0f} MB"
    )


def build_variants_table(manifest: Manifest) -> Table:
    """Returns one row per variant: size, accuracy and cost of what is shipped, side by side."""
    table = Table(title=f"{manifest.name}: variants")
    for heading in ("variant", "precision", "for"):
        table.add_column(heading)
    for heading in (
        "size MB",
        "SNR dB",
        "cosine",
        "top-1",
        "ready ms",
        "init ms",
        "steady ms",
        "private MB",
    ):
        table.add_column(heading, justify="right")
    for variant in manifest.variants:
        table.add_row(*_variant_row(manifest, variant))
    return table


def _variant_row(manifest: Manifest, variant: VariantRecord) -> tuple[str, ...]:
    figures = shipped_figures(variant)
    sizes = [entry.size_bytes for entry in manifest.files if entry.path.startswith(f"{variant.name}/")]
    conversion, accuracy = variant.conversion, variant.accuracy
    binding = {} if conversion is None else conversion.binding
    top1 = [one.top1 for one in accuracy if one.top1 is not None]
    costs = (
        (None, None, None, None)
        if figures is None
        else (figures.ready_ms, figures.init_ms, figures.steady_ms, figures.private_mb)
    )
    return (
        variant.name,
        _show_precision(conversion),
        " ".join(f"{name}={size}" for name, size in binding.items()) or "all shapes",
        _figure(sum(sizes) / 2**20) if sizes else "–",
        f"{min(one.snr_db for one in accuracy):.1f}" if accuracy else "–",
        f"{min(one.cosine for one in accuracy):.5f}" if accuracy else "–",
        f"{min(top1):.3f}" if top1 else "–",
        *map(format_summary, costs),
    )


def _show_precision(conversion: ConversionRecord | None) -> str:
    if conversion is None:
        return "fp32"
    stepped = "" if conversion.asked == conversion.precision else f" (instead of {conversion.asked})"
    return f"{conversion.precision}{stepped}"


def _describe_conversion(conversion: ConversionRecord) -> Iterator[str]:
    if conversion.fused:
        fused = ", ".join(f"{count} {name}" for name, count in conversion.fused.items())
        yield f"  fused by {conversion.fused_by}: {fused}"
    if conversion.binding:
        yield f"  bound to {', '.join(f'{name}={size}' for name, size in conversion.binding.items())}"
    for step in conversion.steps:
        outcome = step.outcome.splitlines()[0]
        kept = f"; {len(step.kept)} of {step.nodes} nodes left in fp32" if step.kept else ""
        trials = f" after {step.trials} trials" if step.trials else ""
        yield f"  {step.precision}: {outcome}{kept}{trials}"


def describe_variant(variant: VariantRecord) -> list[str]:
    """Returns the lines that say how a variant was made."""
    verification = variant.verification
    steps = " → ".join(attempt.step for attempt in variant.ladder)
    lines = [f"{variant.name}: level {variant.level} (ladder: {steps})"]
    if variant.conversion is not None:
        lines += _describe_conversion(variant.conversion)
    if variant.accuracy:
        lines.append(f"  passed its gate on {verification.samples} {verification.inputs} inputs")
    else:
        lines.append(_describe_verification(verification))
    if variant.tuning is not None:
        tuning = variant.tuning
        # How it compares with the default is the decision's to say: one comparison, of what is shipped.
        choice = next((trial for trial in tuning.trials if trial.number == tuning.chosen), None)
        told = f": {describe_choice(tuning, choice)}" if choice else ""
        lines.append(
            f"  tuned: {count_of(len(tuning.trials), 'plan')} tried, trial {tuning.chosen} prepared{told}"
        )
        if tuning.first_phase is not None:
            lines.append(f"  {describe_first_phase(tuning.first_phase)}")
    if variant.decision is not None:
        lines.append(f"  ships {variant.decision.shipped}: {variant.decision.reason}")
    return lines


def _describe_verification(verification: VerificationRecord) -> str:
    worst = max((error.ratio for error in verification.errors), default=0.0)
    noise = max((error.ratio for error in verification.noise_floor), default=0.0)
    return (
        f"  verified on {verification.samples} {verification.inputs} inputs: "
        f"worst error {worst:.2g} of its tolerance, noise floor {noise:.2g}"
    )


def describe_bundle(manifest: Manifest) -> list[str]:
    """Returns the lines above the tables."""
    runtime = manifest.environment.get("onnxruntime", "?")
    size_mb = sum(entry.size_bytes for entry in manifest.files) / 2**20
    lines = [
        f"{manifest.name}: {size_mb:.1f} MB in {len(manifest.files)} files, made {manifest.created_at} "
        f"by ortprep {manifest.pipeline_version} with ONNX Runtime {runtime}",
        f"source: {manifest.source.kind} {manifest.source.location} ({manifest.source.sha256})",
    ]
    lines += [f"missing target {target.target}: {target.reason}" for target in manifest.missing_targets]
    for left_out in manifest.left_out:
        lines.append(f"left out {left_out.variant}: {left_out.reason}")
        lines += _describe_conversion(left_out.conversion) if left_out.conversion else []
    for variant in manifest.variants:
        lines += describe_variant(variant)
    return lines
