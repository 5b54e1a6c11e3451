"""A search: every trial in a table, what was chosen, and why. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.manifest import TrialRecord, TuningRecord
from ortprep.report.content import ReportSection
from ortprep.tables import Cell, CellValue, Table, Tone, count_of, fill_table, format_duration, number_cell


def figures_of(trial: TrialRecord) -> PlanFigures | None:
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


def find_chosen(record: TuningRecord) -> TrialRecord | None:
    """Returns the trial that was prepared."""
    return next((trial for trial in record.trials if trial.number == record.chosen), None)


def describe_first_phase(record: TuningRecord) -> str:
    """Returns what `load` starts with, and what both sessions take."""
    return f"Trial {record.first_phase} serves first; both sessions take about {record.overlap_mb:.0f} MB"


def build_search_section(record: TuningRecord) -> ReportSection:
    """Returns how a search went, and every trial."""
    notes = [
        f"{count_of(len(record.trials), 'plan')} tried in "
        f"{format_duration(record.elapsed_s)}, until {record.ended}; noise {record.noise:.1%}.",
        f"Chosen: trial {record.chosen}: {record.reason}.",
    ]
    if record.limits:
        limits = ", ".join(f"{name} {value:g}" for name, value in record.limits.items())
        notes.append(f"Limits: {limits}.")
    if record.first_phase is not None:
        notes.append(f"{describe_first_phase(record)}.")
    runs = count_of(record.runs_per_load, "run")
    title = f"Every trial, cheapest first, at {runs} per load, relative to the default"
    tables = (_break_even_table(record), build_trials_table(record, title))
    shown = tuple(table for table in tables if table.rows)
    return ReportSection("Search", tuple(notes), shown)


FIGURES: tuple[tuple[str, Callable[[PlanFigures], CellValue]], ...] = (
    ("ready ms", lambda figures: figures.ready_ms),
    ("init ms", lambda figures: figures.init_ms),
    ("steady ms", lambda figures: figures.steady_ms),
    ("private MB", lambda figures: figures.private_mb),
    ("cost", lambda figures: number_cell(figures.cost, f"{figures.cost:.3g}×")),
)
"""Columns with the figures of a trial."""


def build_trials_table(record: TuningRecord, title: str) -> Table:
    """Returns one row per trial, cheapest first; what failed comes last."""

    def cost(trial: TrialRecord) -> tuple[bool, float, int]:
        figures = figures_of(trial)
        return figures is None, figures.cost if figures else 0.0, trial.number

    def read_figures(read: Callable[[PlanFigures], CellValue]) -> Callable[[TrialRecord], CellValue]:
        return lambda trial: None if (figures := figures_of(trial)) is None else read(figures)

    trials = sorted(record.trials, key=cost)
    front = {trial.number for trial in find_front(record)}
    return fill_table(
        title,
        trials,
        (
            ("trial", lambda trial: trial.number),
            ("plan", lambda trial: _describe_trial(record, trial, in_front=trial.number in front)),
            *((heading, read_figures(read)) for heading, read in FIGURES),
        ),
        marked=next((row for row, trial in enumerate(trials) if trial.number == record.chosen), None),
    )


def _describe_trial(record: TuningRecord, trial: TrialRecord, *, in_front: bool) -> Cell:
    """Returns a trial's plan and what sets it apart: how it failed, or that it was chosen, and the like."""
    plan = describe_choice(record, trial)
    if trial.failure is not None:
        return Cell(f"{plan}; failed: {trial.failure.strip().partition(chr(10))[0]}", tone="bad")
    is_chosen = trial.number == record.chosen
    remarks = [
        *(["chosen"] if is_chosen else []),
        *(["serves first"] if trial.number == record.first_phase else []),
        *trial.violations,
        *(["front"] if in_front else []),
    ]
    tone: Tone = "good" if is_chosen else "warning" if trial.violations else "plain"
    return Cell("; ".join((plan, *remarks)), tone=tone)


def _break_even_table(record: TuningRecord) -> Table:
    """Returns which plan costs least at how many runs per load."""
    trials = {trial.number: trial for trial in record.trials}
    searched = f"the search was for {count_of(record.runs_per_load, 'run')} per load"
    return fill_table(
        f"Break-even: which plan costs least; {searched}",
        find_legs(record),
        (
            ("runs per load, from", lambda leg: leg.first),
            ("to", lambda leg: "any number" if leg.to is None else leg.to),
            ("trial", lambda leg: leg.trial),
            ("plan", lambda leg: describe_choice(record, trials[leg.trial]) if leg.trial in trials else ""),
        ),
    )


class Leg(NamedTuple):
    """Numbers of runs per load at which one plan costs least; `to` is None if it has no end."""

    trial: int
    first: int
    to: int | None


def find_front(record: TuningRecord) -> tuple[TrialRecord, ...]:
    """Returns the plans within the limits that no other beats in both figures, soonest ready first."""
    good = (one for one in record.trials if all(map(math.isfinite, _place(one))) and not one.violations)
    front: list[TrialRecord] = []
    for trial in sorted(good, key=lambda trial: (*_place(trial), trial.number)):
        if not front or _place(trial)[1] < _place(front[-1])[1]:
            front.append(trial)
    return tuple(front)


def _place(trial: TrialRecord) -> tuple[float, float]:
    """Returns when a trial's plan is ready and how long its runs take, in ms; infinite where it failed."""
    figures = figures_of(trial)
    return (figures.ready_ms.median, figures.steady_ms.median) if figures else (math.inf, math.inf)


def find_legs(record: TuningRecord) -> tuple[Leg, ...]:
    """Returns which plan costs least at how many runs per load, fewest runs first."""
    chain: list[tuple[int, float, float, int]] = []
    for trial in find_front(record):  # each has a later first result than the one before, and shorter runs
        (ready_ms, steady_ms), first = _place(trial), 1.0
        while chain:
            _, sooner_ms, longer_ms, since = chain[-1]
            first = 2 + (ready_ms - sooner_ms) // (longer_ms - steady_ms)  # it has made up for it by then
            if first > since:
                break
            chain.pop()  # another is cheaper wherever it is cheaper than those before it
        if first < math.inf:
            chain.append((trial.number, ready_ms, steady_ms, int(first)))
    ends = itertools.chain((first - 1 for *_, first in chain[1:]), itertools.repeat(None))
    return tuple(Leg(number, first, to) for (number, *_, first), to in zip(chain, ends, strict=False))


def build_knobs_table(record: TuningRecord) -> Table | None:
    """Returns what every knob was set to; None where plain ONNX Runtime was chosen."""
    chosen = find_chosen(record)
    if chosen is None or "plan" in chosen.choice:
        return None
    return fill_table(
        "What was searched, and what was chosen",
        chosen.choice.items(),
        (
            ("knob", lambda choice: choice[0]),
            ("chosen", lambda choice: choice[1]),
            ("values", lambda choice: ", ".join(record.knobs.get(choice[0], choice[1:]))),
        ),
    )
