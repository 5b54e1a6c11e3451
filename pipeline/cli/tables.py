"""Manifests as tables for people."""

from __future__ import annotations

from rich.table import Table

from pipeline.bundle.manifest import Manifest, MeasurementRecord, PlanFigures, VariantRecord
from pipeline.bundle.summary import Summary
from pipeline.bundle.tuning_record import FirstPhaseRecord


def build_figures_table(measurement: MeasurementRecord, *, title: str) -> Table:
    """Returns one row per plan: medians, the distance between quartiles, and ratios to the default plan."""
    table = Table(title=f"{title}, {measurement.cache} cache, {measurement.shapes}")
    table.add_column("plan")
    for heading in (
        "init ms",
        "first run ms",
        "first result ms",
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
    sooner = f"{default.first_result_ms.median / plan.first_result_ms.median:.1f}×" if default else ""
    summaries = (
        plan.init_ms,
        plan.first_ms,
        plan.first_result_ms,
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


def describe_variant(variant: VariantRecord) -> list[str]:
    """Returns the lines that say how a variant was made."""
    worst = max((error.ratio for error in variant.verification.errors), default=0.0)
    noise = max((error.ratio for error in variant.verification.noise_floor), default=0.0)
    steps = " → ".join(attempt.step for attempt in variant.ladder)
    lines = [
        f"{variant.name}: level {variant.level} (ladder: {steps})",
        f"  verified on {variant.verification.samples} {variant.verification.inputs} inputs: "
        f"worst error {worst:.2g} of its tolerance, noise floor {noise:.2g}",
    ]
    if variant.tuning is not None:
        tuning = variant.tuning
        lines.append(f"  tuned: {len(tuning.trials)} plans tried; {tuning.reason}")
        if tuning.first_phase is not None:
            lines.append(f"  {describe_first_phase(tuning.first_phase)}")
    if variant.decision is not None:
        lines.append(f"  ships {variant.decision.shipped}: {variant.decision.reason}")
    return lines


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
    for variant in manifest.variants:
        lines += describe_variant(variant)
    return lines
