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
    MeasurementRecord,
    TrialRecord,
    TuningRecord,
    VariantRecord,
    VerificationRecord,
    sum_folders,
)
from ortprep.measuring.shipped import (
    DEFAULT,
    FIRST,
    FORKED,
    PORTABLE,
    PREPARED,
    count_inputs,
    shipped_figures,
)
from ortprep.tables import Cell, CellValue, Table, count_of, fill_table, number_cell

if TYPE_CHECKING:
    from ortprep.runtime.placement import ModelLoad, Placement


LEGEND = "a ± b: the median, and half the distance between the quartiles; a [b–c]: the quartiles themselves"
"""What the figures of every table are."""

MEANINGS = {
    DEFAULT: "the source model in plain ONNX Runtime, optimised at every load",
    FIRST: "what serves until the prepared plan is ready",
    PREPARED: "what was prepared for this target",
    PORTABLE: "the variant that runs on any machine",
    FORKED: "a fork of a process that has loaded what ships, on one thread, from the fork on",
}
"""What each plan of a measurement is."""

_FIGURES: tuple[tuple[str, Callable[[PlanFigures], CellValue]], ...] = (
    ("ready ms", lambda plan: plan.ready_ms),
    ("init ms", lambda plan: plan.init_ms),
    ("first run ms", lambda plan: plan.first_ms),
    ("steady ms", lambda plan: plan.steady_ms),
    ("private MB", lambda plan: plan.private_mb),
    ("peak MB", lambda plan: plan.peak_mb),
    ("GPU MB", lambda plan: plan.gpu_mb),
)

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

    def size_mb(variant: VariantRecord) -> float | None:
        return sizes[variant.name] / _MB if variant.name in sizes else None

    def cost(read: Callable[[PlanFigures], CellValue]) -> Callable[[VariantRecord], CellValue]:
        return lambda variant: None if (shipped := shipped_figures(variant)) is None else read(shipped)

    return fill_table(
        f"{manifest.name}: variants",
        manifest.variants,
        (
            ("variant", lambda variant: variant.name),
            ("size MB", size_mb),
            ("ready ms", cost(lambda plan: plan.ready_ms)),
            ("init ms", cost(lambda plan: plan.init_ms)),
            ("steady ms", cost(lambda plan: plan.steady_ms)),
            ("private MB", cost(lambda plan: plan.private_mb)),
        ),
    )


def build_plans_table(measurement: MeasurementRecord, title: str) -> Table:
    """Returns a row per figure and a column per plan."""

    def column(plan: PlanFigures) -> Callable[[tuple[str, Callable[[PlanFigures], CellValue]]], CellValue]:
        return lambda figure: figure[1](plan)

    figures = [
        figure for figure in _FIGURES if any(figure[1](plan) is not None for plan in measurement.plans)
    ]
    columns = ((plan.plan, column(plan)) for plan in measurement.plans)
    return fill_table(title, figures, (("figure", lambda figure: figure[0]), *columns))


def build_trials_table(record: TuningRecord, title: str) -> Table:
    """Returns one row per trial of a search, cheapest first; what failed comes last."""

    def figures(trial: TrialRecord) -> PlanFigures | None:
        return trial.final or trial.figures  # those of the last comparison if it took part

    def cost(trial: TrialRecord) -> tuple[bool, float, int]:
        found = figures(trial)
        return found is None, found.cost if found else 0.0, trial.number

    def read(of: Callable[[PlanFigures], CellValue]) -> Callable[[TrialRecord], CellValue]:
        return lambda trial: None if (found := figures(trial)) is None else of(found)

    return fill_table(
        title,
        sorted(record.trials, key=cost),
        (
            ("trial", lambda trial: trial.number),
            ("plan", lambda trial: _describe_trial(record, trial)),
            ("ready ms", read(lambda found: found.ready_ms)),
            ("init ms", read(lambda found: found.init_ms)),
            ("steady ms", read(lambda found: found.steady_ms)),
            ("private MB", read(lambda found: found.private_mb)),
            ("cost", read(lambda found: number_cell(found.cost, f"{found.cost:.3g}×"))),
        ),
    )


def _describe_trial(record: TuningRecord, trial: TrialRecord) -> str:
    """Returns a trial's plan and what sets it apart: how it failed, or that it was chosen, and the like."""
    plan = _describe_choice(record, trial)
    if trial.failure is not None:
        return f"{plan}; failed: {trial.failure.strip().partition(chr(10))[0]}"
    chosen = ["chosen"] if trial.number == record.chosen else []
    first = ["serves first"] if trial.number == record.first_phase else []
    return "; ".join((plan, *chosen, *first, *trial.violations))


def _describe_choice(record: TuningRecord, trial: TrialRecord) -> str:
    """Returns what a plan changes of the base plan, the first value of every knob."""
    if "plan" in trial.choice:
        return trial.choice["plan"]
    changed = [
        f"{knob}={value}"
        for knob, value in trial.choice.items()
        if value != next(iter(record.knobs.get(knob, (value,))))
    ]
    return " ".join(changed) or "the base plan"


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

    def snr(variant: VariantRecord) -> Cell:
        value = min(output.snr_db for output in variant.accuracy)
        return number_cell(value, f"{value:.1f}")

    return fill_table(
        f"{manifest.name}: the worst output of each converted variant, against the source",
        [variant for variant in manifest.variants if variant.accuracy],
        (
            ("variant", lambda variant: variant.name),
            ("precision", precision),
            ("SNR dB", snr),
            ("top-1", top1),
        ),
    )


def _describe_conversion(conversion: ConversionRecord) -> Iterator[str]:
    """Yields what was fused and converted, which inputs and what judged it, and how each step went."""
    if conversion.fused:
        parts = ", ".join(f"{number} {name}" for name, number in conversion.fused.items())
        yield f"  fused by {conversion.fused_by}: {parts}"
    for what, samples in (("calibrated", conversion.calibration), ("judged", conversion.judged_on)):
        if samples is not None:
            yield f"  {what} on {count_of(samples.count, 'input')} ({samples.digest})"
    if conversion.verdict is not None:
        yield f"  judged by {conversion.verdict}"
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
        choice = next((trial for trial in tuning.trials if trial.number == tuning.chosen), None)
        summary = f": {_describe_choice(tuning, choice)}" if choice else ""
        lines.append(
            f"  tuned: {count_of(len(tuning.trials), 'plan')} tried, trial {tuning.chosen} prepared{summary}"
        )
        if tuning.first_phase is not None:
            both = f"both sessions take about {tuning.overlap_mb:.0f} MB"
            lines.append(f"  trial {tuning.first_phase} serves first; {both}")
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
