"""Manifests, searches and pools as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from ortprep.bundle.conversion_record import ConversionRecord
from ortprep.bundle.loader_config import LoaderConfig
from ortprep.bundle.manifest import (
    Manifest,
    MeasurementRecord,
    PlanFigures,
    VariantRecord,
    VerificationRecord,
)
from ortprep.bundle.requirements_file import pin_onnxruntime
from ortprep.bundle.tuning_record import FirstPhaseRecord, Summary, TrialFigures, TrialRecord, TuningRecord
from ortprep.cli.console import build_table
from ortprep.measuring.shipped import shipped_figures
from ortprep.report.formatting import count_of, format_ratio
from ortprep.report.measurement_sections import MEANINGS
from ortprep.report.trials import describe_choice, figures_of, find_remarks, rank_trial

if TYPE_CHECKING:
    from ortprep.doctor.load_test import LoadTestResult
    from ortprep.runtime.placement.assignment import ModelLoad, Placement
    from ortprep.runtime.pool.stats import PoolStats, WorkerStats
    from ortprep.stages.tune.remeasurement import Remeasurement


LEGEND = "a ± b: the median, and half the distance between the quartiles; a [b–c]: the quartiles themselves"
"""What the figures of every table are."""

_ROWS: tuple[tuple[str, Callable[[PlanFigures], Summary | None]], ...] = (
    ("ready ms", lambda plan: plan.ready_ms),
    ("init ms", lambda plan: plan.init_ms),
    ("first run ms", lambda plan: plan.first_ms),
    ("steady ms", lambda plan: plan.steady_ms),
    ("private MB", lambda plan: plan.private_mb),
    ("peak MB", lambda plan: plan.peak_mb),
    ("GPU MB", lambda plan: plan.gpu_mb),
)


def build_figures_table(measurement: MeasurementRecord, *, title: str) -> Table:
    """Returns a column per plan: medians, the distance between quartiles, and ratios to the default plan."""
    plans = measurement.plans
    default = next((plan for plan in plans if plan.plan == "default"), None)
    rows = [
        (name, *(format_summary(figure(plan)) for plan in plans))
        for name, figure in _ROWS
        if any(figure(plan) is not None for plan in plans)
    ]
    if default is not None:
        rows.append(
            ("sooner", *(format_ratio(default.ready_ms.median / plan.ready_ms.median) for plan in plans))
        )
    headings = ("", *(f">{plan.plan}" for plan in plans))
    return build_table(f"{title}, {measurement.cache} cache, {measurement.shapes}", headings, rows)


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
    """Returns one row per variant: the size and cost of what is shipped, side by side."""
    headings = ("variant", "for", ">size MB", ">ready ms", ">init ms", ">steady ms", ">private MB")
    rows = [_variant_row(manifest, variant) for variant in manifest.variants]
    return build_table(f"{manifest.name}: variants", headings, rows)


def _variant_row(manifest: Manifest, variant: VariantRecord) -> tuple[str, ...]:
    figures = shipped_figures(variant)
    sizes = [entry.size_bytes for entry in manifest.files if entry.path.startswith(f"{variant.name}/")]
    binding = {} if variant.conversion is None else variant.conversion.binding
    costs = (
        (None, None, None, None)
        if figures is None
        else (figures.ready_ms, figures.init_ms, figures.steady_ms, figures.private_mb)
    )
    return (
        variant.name,
        " ".join(f"{name}={size}" for name, size in binding.items()) or "all shapes",
        _figure(sum(sizes) / 2**20) if sizes else "–",
        *map(format_summary, costs),
    )


def build_accuracy_table(manifest: Manifest) -> Table | None:
    """Returns one row per converted variant: how near its answers are to the source's; None without any."""
    converted = [variant for variant in manifest.variants if variant.accuracy]
    if not converted:
        return None
    headings = ("variant", "precision", ">SNR dB", ">cosine", ">top-1")
    title = f"{manifest.name}: the worst output of each converted variant, against the source"
    return build_table(title, headings, map(_accuracy_row, converted))


def _accuracy_row(variant: VariantRecord) -> tuple[str, ...]:
    accuracy = variant.accuracy
    top1 = [output.top1 for output in accuracy if output.top1 is not None]
    return (
        variant.name,
        _show_precision(variant.conversion),
        f"{min(output.snr_db for output in accuracy):.1f}",
        f"{min(output.cosine for output in accuracy):.5f}",
        f"{min(top1):.3f}" if top1 else "–",
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
        lines.append(f"  passed its gate on {verification.samples} {verification.inputs} inputs")
    else:
        lines.append(_describe_verification(verification))
    if variant.tuning is not None:
        tuning = variant.tuning
        # How it compares with the default is the decision's to say: one comparison, of what is shipped.
        choice = next((trial for trial in tuning.trials if trial.number == tuning.chosen), None)
        summary = f": {describe_choice(tuning, choice)}" if choice else ""
        lines.append(
            f"  tuned: {count_of(len(tuning.trials), 'plan')} tried, trial {tuning.chosen} prepared{summary}"
        )
        if tuning.first_phase is not None:
            lines.append(f"  {describe_first_phase(tuning.first_phase)}")
    if variant.decision is not None:
        lines.append(f"  ships {variant.decision.shipped}: {variant.decision.reason}")
    return lines


def _describe_verification(verification: VerificationRecord) -> str:
    worst = max((error.ratio for error in verification.errors), default=0.0)
    noise = max((error.ratio for error in verification.noise_floor), default=0.0)
    inputs = count_of(verification.samples, f"{verification.inputs} input")
    return f"  verified on {inputs}: worst error {worst:.2g} of its tolerance, noise floor {noise:.2g}"


def describe_bundle(manifest: Manifest) -> list[str]:
    """Returns the lines above the tables."""
    size_mb = sum(entry.size_bytes for entry in manifest.files) / 2**20
    lines = [
        f"{manifest.name}: {size_mb:.1f} MB in {len(manifest.files)} files, made {manifest.created_at} "
        f"by ortprep {manifest.pipeline_version} with {pin_onnxruntime(manifest.environment)}",
        f"source: {manifest.source.kind} {manifest.source.location} ({manifest.source.sha256})",
    ]
    lines += [f"missing target {target.target}: {target.reason}" for target in manifest.missing_targets]
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


_FIGURES = (">ready ms", ">init ms", ">steady ms", ">private MB", ">cost")


def build_trials_table(record: TuningRecord, *, title: str) -> Table:
    """Returns one row per trial, cheapest first; a choice is told by what it changes."""
    rows = [
        (
            str(trial.number),
            "; ".join((describe_choice(record, trial), *find_remarks(record, trial))),
            *_cells(figures_of(trial)),
        )
        for trial in sorted(record.trials, key=rank_trial)
    ]
    return build_table(
        f"{title}, cost at {record.runs_per_load} runs per load, relative to default ONNX Runtime",
        (">trial", "plan", *_FIGURES),
        rows,
    )


def _cells(figures: TrialFigures | None) -> tuple[str, ...]:
    if figures is None:
        return ("–",) * 5
    summaries = (figures.ready_ms, figures.init_ms, figures.steady_ms, figures.private_mb)
    return (*(format_summary(summary) for summary in summaries), f"{figures.cost_ratio.median:.3f}×")


def describe_search(record: TuningRecord) -> list[str]:
    """Returns the lines that say what a search came to."""
    lines = [
        LEGEND,
        f"{count_of(len(record.trials), 'plan')} of {record.combinations} combinations tried in "
        f"{record.elapsed_s:.0f} s, until {record.ended}; noise {record.noise:.1%}",
        f"chosen: trial {record.chosen}: {record.reason}",
    ]
    if record.first_phase is not None:
        lines.append(describe_first_phase(record.first_phase))
    lines += [
        f"trial {point.steadier} costs less than trial {point.sooner} from {point.runs} runs per load on"
        for point in record.break_evens
    ]
    return lines


def build_again_table(trial: TrialRecord, again: Remeasurement, *, title: str) -> Table:
    """Returns a trial's figures then and now, and default ONNX Runtime's now."""
    rows = (
        ("recorded", *_cells(figures_of(trial))),
        ("now", *_cells(again.figures)),
        ("default, now", *_cells(again.default)),
    )
    return build_table(f"{title}, trial {trial.number}", ("", *_FIGURES), rows)


_MB = 2**20


def build_placement_table(loads: Sequence[ModelLoad], placement: Placement) -> Table:
    """Returns one row per device: its models, the work of a round, and the memory they take."""
    costs = {load.name: load.cost_ms for load in loads}
    rows = [
        (
            assignment.device,
            ", ".join(f"{name} ({costs[name]:.3g} ms)" for name in assignment.models) or "–",
            f"{assignment.cost_ms:.3g}",
            f"{assignment.memory_bytes / _MB:.0f}",
        )
        for assignment in placement.assignments
    ]
    title = f"a round of one request per model takes at least {placement.makespan_ms:.3g} ms"
    return build_table(title, ("device", "models", ">ms a round", ">memory MB"), rows)


def build_workers_table(stats: PoolStats) -> Table:
    """Returns one row per worker: what it took to start and what it has served."""
    figures = (">pid", ">ready after s", ">private MB", ">served", ">p50 ms", ">p99 ms", ">restarts")
    headings = ("worker", "state", "variant", *figures)
    return build_table("workers", headings, map(_worker_row, stats.workers))


def _worker_row(worker: WorkerStats) -> tuple[str, ...]:
    private_mb = None if worker.private_bytes is None else worker.private_bytes / _MB
    return (
        worker.name,
        worker.state,
        ", ".join(_served_variants(worker)) or "–",
        "–" if worker.pid is None else str(worker.pid),
        _pool_figure(worker.start_s),
        _pool_figure(private_mb),
        str(worker.served),
        _pool_figure(worker.p50_ms),
        _pool_figure(worker.p99_ms),
        str(worker.restarts),
    )


def _served_variants(worker: WorkerStats) -> Iterator[str]:
    for model, variant in worker.variants.items():
        buckets = len(worker.buckets.get(model, ()))
        yield f"{variant} and {buckets} bucket{'s' if buckets > 1 else ''}" if buckets else variant


def describe_load_test(result: LoadTestResult) -> Iterator[str]:
    """Yields the lines that say what came of many requests."""
    yield (
        f"{result.requests} requests in {result.elapsed_s:.2f} s: {result.per_second:.0f} a second, "
        f"{result.wrong} answered wrongly, {result.failed} failed"
    )
    yield "p50 and p99 ms: from a request's call to its answer, including the wait for a free worker"
    for problem in result.problems:
        yield f"  {problem}"


def _pool_figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
