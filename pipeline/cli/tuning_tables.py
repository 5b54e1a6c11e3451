"""Searches as tables for people."""

from __future__ import annotations

from rich.table import Table

from pipeline.bundle.tuning_record import TrialFigures, TrialRecord, TuningRecord
from pipeline.cli.tables import describe_first_phase, format_summary
from pipeline.report.trials import describe_choice, figures_of
from pipeline.stages.tune.again import Again


def build_trials_table(record: TuningRecord, *, title: str) -> Table:
    """Returns one row per trial, cheapest first; a choice is told by what it changes."""
    table = Table(title=f"{title}, cost at {record.runs_per_load} runs per load")
    table.add_column("trial", justify="right")
    table.add_column("plan", overflow="fold")
    for heading in ("ready ms", "init ms", "steady ms", "private MB", "cost of default's"):
        table.add_column(heading, justify="right")
    table.add_column("", overflow="fold")
    for trial in sorted(record.trials, key=_rank):
        figures = figures_of(trial)
        table.add_row(
            str(trial.number), describe_choice(record, trial), *_cells(figures), _remark(record, trial)
        )
    return table


def _rank(trial: TrialRecord) -> tuple[bool, float, int]:
    figures = figures_of(trial)
    return figures is None, figures.cost_ratio.median if figures else 0.0, trial.number


def _cells(figures: TrialFigures | None) -> tuple[str, ...]:
    if figures is None:
        return ("–",) * 5
    summaries = (figures.ready_ms, figures.init_ms, figures.steady_ms, figures.private_mb)
    return (*(format_summary(one) for one in summaries), f"{figures.cost_ratio.median:.3f}×")


def _remark(record: TuningRecord, trial: TrialRecord) -> str:
    if trial.failure is not None:
        return f"failed: {trial.failure.splitlines()[0]}"
    remarks = list(trial.violations)
    if trial.number == record.chosen:
        remarks.insert(0, "chosen")
    if record.first_phase is not None and trial.number == record.first_phase.trial:
        remarks.insert(0, "serves first")
    if trial.number in {point.trial for point in record.front}:
        remarks.append("front")
    return ", ".join(remarks)


def describe_search(record: TuningRecord) -> list[str]:
    """Returns the lines that say what a search came to."""
    tried = len(record.trials)
    plans = "1 plan" if tried == 1 else f"{tried} plans"
    lines = [
        f"{plans} of {record.combinations} combinations tried in {record.elapsed_s:.0f} s, until "
        f"{record.ended}; noise {record.noise:.1%}",
        f"chosen: trial {record.chosen}: {record.reason}",
    ]
    if record.first_phase is not None:
        lines.append(describe_first_phase(record.first_phase))
    lines += [
        f"trial {one.steadier} costs less than trial {one.sooner} from {one.runs} runs per load on"
        for one in record.break_evens
    ]
    return lines


def build_again_table(trial: TrialRecord, again: Again, *, title: str) -> Table:
    """Returns a trial's figures then and now, and default ONNX Runtime's now."""
    table = Table(title=f"{title}, trial {trial.number}")
    table.add_column("")
    for heading in ("ready ms", "init ms", "steady ms", "private MB", "cost of default's"):
        table.add_column(heading, justify="right")
    table.add_row("recorded", *_cells(figures_of(trial)))
    table.add_row("now", *_cells(again.figures))
    table.add_row("default, now", *_cells(again.default))
    return table
