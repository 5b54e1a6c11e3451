"""A search in pictures: where the plans are; and which plan costs least at how many runs per load. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortprep.bundle.tuning_record import TrialFigures, TrialRecord, TuningRecord
from ortprep.measuring.comparison import pareto_front
from ortprep.report.content import Chart, ReportTable
from ortprep.report.formatting import count_of, make_table, rounded
from ortprep.report.trials import describe_choice, figures_of


@dataclass(frozen=True)
class _Spot:
    """A trial in the plane: two figures in ms."""

    trial: TrialRecord
    x: float
    y: float


def build_front_charts(record: TuningRecord) -> tuple[Chart, ...]:
    """Returns the plans by init and by readiness against steady runs."""
    spots = _spots(record, lambda figures: figures.init_ms.median)
    if not spots:
        return ()
    allowed = [spot for spot in spots if not spot.trial.violations]
    front = pareto_front(allowed, lambda spot: (spot.x, spot.y, spot.trial.number))
    charts = [_chart(record, spots, front, "init")]
    if record.front:
        # Plans of the front are placed by their ratio to the anchor in the same rounds, others as measured.
        points = {point.trial: (point.first_result_ms, point.steady_ms) for point in record.front}
        ready = [
            _Spot(spot.trial, *points.get(spot.trial.number, (spot.x, spot.y)))
            for spot in _spots(record, lambda figures: figures.ready_ms.median)
        ]
        charts.append(_chart(record, ready, [spot for spot in ready if spot.trial.number in points], "ready"))
    return tuple(charts)


def _spots(record: TuningRecord, read: Callable[[TrialFigures], float]) -> tuple[_Spot, ...]:
    pairs = ((trial, figures_of(trial)) for trial in record.trials)
    spots = (_Spot(trial, read(figures), figures.steady_ms.median) for trial, figures in pairs if figures)
    return tuple(spot for spot in spots if min(spot.x, spot.y) > 0 and math.isfinite(spot.x + spot.y))


def _chart(record: TuningRecord, spots: Sequence[_Spot], front: Sequence[_Spot], figure: str) -> Chart:
    ranks = {spot.trial.number: rank for rank, spot in enumerate(sorted(front, key=lambda spot: spot.x))}
    # The chosen one last, so that it is drawn over the others.
    ordered = sorted(spots, key=lambda spot: spot.trial.number == record.chosen)
    columns = (">trial", f">{figure}, ms", ">steady run, ms", "~plan")
    rows = [(spot.trial.number, spot.x, spot.y, describe_choice(record, spot.trial)) for spot in front]
    return Chart(
        kind="front",
        title=f"{figure.capitalize()} against steady run",
        values=tuple(_spot_row(record, spot, ranks) for spot in ordered),
        table=make_table("Plans that no other plan beats in both figures", columns, rows),
        parameters={"x": f"{figure}, ms", "y": "steady run, ms"},
    )


def _spot_row(record: TuningRecord, spot: _Spot, ranks: Mapping[int, int]) -> Mapping[str, Any]:
    number = spot.trial.number
    row: dict[str, Any] = {
        "trial": number,
        "x": rounded(spot.x),
        "y": rounded(spot.y),
        "what": _classify(record, spot.trial, on_front=number in ranks),
    }
    if number in ranks:
        row["rank"] = ranks[number]
    if number == record.chosen:
        row["label"] = f"{number}, chosen"
    return row


def _classify(record: TuningRecord, trial: TrialRecord, *, on_front: bool) -> str:
    if trial.number == record.chosen:
        return "chosen"
    if trial.choice.get("plan") == "default":
        return "default"
    if record.first_phase is not None and trial.number == record.first_phase.trial:
        return "serves first"
    return "front" if on_front else "trial"


@dataclass(frozen=True)
class _Leg:
    """Runs per load at which one plan costs least; `to` is None if it has no end."""

    trial: int
    first: int
    to: int | None


def find_legs(record: TuningRecord) -> tuple[_Leg, ...]:
    """Returns which plan costs least at how many runs per load, fewest runs first."""
    if not record.front:
        return ()
    if not record.break_evens:
        return (_Leg(record.front[0].trial, 1, None),)
    starts = [(record.break_evens[0].sooner, 1), *((one.steadier, one.runs) for one in record.break_evens)]
    ends = [*(one.runs - 1 for one in record.break_evens), None]
    return tuple(_Leg(trial, first, to) for (trial, first), to in zip(starts, ends, strict=True))


def build_break_even_table(record: TuningRecord) -> ReportTable:
    """Returns which plan costs least at how many runs per load."""
    trials = {trial.number: trial for trial in record.trials}
    columns = (">runs per load, from", ">to", ">trial", "~plan")
    rows = [
        (
            leg.first,
            "any number" if leg.to is None else leg.to,
            leg.trial,
            describe_choice(record, trials[leg.trial]) if leg.trial in trials else "",
        )
        for leg in find_legs(record)
    ]
    searched = f"the search was for {count_of(record.runs_per_load, 'run')} per load"
    return make_table(f"Break-even: which plan costs least; {searched}", columns, rows)
