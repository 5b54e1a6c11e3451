"""Every trial of a search, and what was chosen of it, with the reason that the figures give. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ortprep.bundle.tuning_record import TrialFigures, TrialRecord, TuningRecord
from ortprep.report.content import Cell, ReportTable, Tone
from ortprep.report.formatting import (
    ABSENT,
    CellValue,
    count_of,
    format_cost,
    make_table,
    number_cell,
    text_cell,
)


def figures_of(trial: TrialRecord) -> TrialFigures | None:
    """Returns a trial's figures: those of the last comparison if it took part."""
    return trial.final or trial.figures


def describe_choice(record: TuningRecord, trial: TrialRecord) -> str:
    """Returns what a plan changes of the base plan, the first value of every knob."""
    if "plan" in trial.choice:
        return trial.choice["plan"]
    changed = [
        f"{knob}={value}"
        for knob, value in trial.choice.items()
        if value != next(iter(record.knobs.get(knob, (value,))))
    ]
    return " ".join(changed) or "the base plan"


def build_trials_table(record: TuningRecord) -> ReportTable:
    """Returns one row per trial, cheapest first; what failed comes last."""
    columns = (
        ">trial",
        "~plan",
        ">ready ms",
        ">init ms",
        ">steady ms",
        ">private MB",
        ">cost, of default’s",
        "~remark",
        "tried as",
    )
    trials = sorted(record.trials, key=rank_trial)
    runs = count_of(record.runs_per_load, "run")
    caption = f"Every trial, cheapest first, at {runs} per load; ★ is the chosen one"
    table = make_table(
        caption, columns, (_row(record, trial) for trial in trials), sortable=True, filterable=True
    )
    chosen = (row for row, trial in enumerate(trials) if trial.number == record.chosen)
    return replace(table, marked=next(chosen, None))


def rank_trial(trial: TrialRecord) -> tuple[bool, float, int]:
    """Sorts trials by what they cost; those that failed come last."""
    figures = figures_of(trial)
    return figures is None, figures.cost_ratio.median if figures else 0.0, trial.number


def _row(record: TuningRecord, trial: TrialRecord) -> tuple[CellValue, ...]:
    return (
        trial.number,
        describe_choice(record, trial),
        *_figures(figures_of(trial)),
        text_cell(", ".join(find_remarks(record, trial)), _tone_of(record, trial)),
        trial.kind,
    )


def _figures(figures: TrialFigures | None) -> tuple[CellValue, ...]:
    if figures is None:
        return (Cell(ABSENT),) * 5
    spreads = (figures.ready_ms, figures.init_ms, figures.steady_ms, figures.private_mb)
    cost = figures.cost_ratio.median
    return (*(one for one in spreads), number_cell(cost, format_cost(cost)))


def find_remarks(record: TuningRecord, trial: TrialRecord) -> list[str]:
    """Returns what sets a trial apart: how it failed, or that it was chosen, serves first, and the like."""
    if trial.failure is not None:
        return [f"failed: {trial.failure.strip().partition(chr(10))[0]}"]
    is_first_phase = record.first_phase is not None and trial.number == record.first_phase.trial
    return [
        *(["chosen"] if trial.number == record.chosen else []),
        *(["serves first"] if is_first_phase else []),
        *trial.violations,
        *(["front"] if trial.number in {point.trial for point in record.front} else []),
    ]


def _tone_of(record: TuningRecord, trial: TrialRecord) -> Tone:
    if trial.failure is not None:
        return "bad"
    if trial.number == record.chosen:
        return "good"
    return "warning" if trial.violations else "plain"


def find_chosen(record: TuningRecord) -> TrialRecord | None:
    """Returns the trial that was prepared."""
    return next((trial for trial in record.trials if trial.number == record.chosen), None)


def build_knobs_table(record: TuningRecord) -> ReportTable | None:
    """Returns what every knob was set to, and why; None where plain ONNX Runtime was chosen."""
    chosen = find_chosen(record)
    if chosen is None or "plan" in chosen.choice:
        return None
    columns = ("knob", "chosen", "~values", "~reason")
    rows = tuple(
        (knob, value, ", ".join(record.knobs.get(knob, (value,))), explain_knob(record, chosen, knob))
        for knob, value in chosen.choice.items()
    )
    return make_table("What was searched, and what was chosen", columns, rows)


def explain_knob(record: TuningRecord, chosen: TrialRecord, knob: str) -> str:
    """Returns why a knob has the value it has: the best plan with another value, beside the chosen one."""
    value = chosen.choice[knob]
    values = record.knobs.get(knob, (value,))
    if len(values) < 2:
        return "there is no other value here"
    origin = "base plan’s value" if value == values[0] else f"changed from {values[0]}"
    others = [trial for trial in record.trials if trial.choice.get(knob, value) != value]
    return f"{origin}; {compare_with(chosen, others)}"


def compare_with(chosen: TrialRecord, others: Sequence[TrialRecord]) -> str:
    """Returns what the chosen plan costs beside the cheapest of others, by figures of the same kind.

    Those of the last comparison, where both sides took part in it: they are of the same rounds.
    """
    if not others:
        return "no other value was tried"
    allowed = [other for other in others if not other.violations]
    compared = [(other.number, other.final, other.figures) for other in allowed]
    for when, mine, theirs in (
        ("last compared", chosen.final, [(number, final) for number, final, _ in compared]),
        ("first tried", chosen.figures, [(number, first) for number, _, first in compared]),
    ):
        costs = [(one.cost_ratio.median, number) for number, one in theirs if one]
        if mine is not None and costs:
            return _phrase_costs(mine.cost_ratio.median, *min(costs), when)
    return "no plan with another value could be measured within the limits"


def _phrase_costs(mine: float, best: float, number: int, when: str) -> str:
    rival = f"{format_cost(best)} with the best other value (trial {number})"
    text = f"when {when}, cost {format_cost(mine)} of default’s, and {rival}"
    return text if mine < best else f"{text}: no gain of its own was measured"
