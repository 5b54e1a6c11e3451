"""What a search says in pictures: where the plans are, and which costs least at how many runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortprep.bundle.tuning_record import TrialFigures, TrialRecord, TuningRecord
from ortprep.measuring.comparison import pareto_front
from ortprep.report.content import Chart, ReportTable
from ortprep.report.formatting import count_of, format_number, make_table, rounded
from ortprep.report.trials import describe_choice, figures_of

RUNS = tuple(sorted({round(10 ** (exponent / 3)) for exponent in range(19)}))
"""Runs per load that costs are drawn at: three a decade, up to a million."""


_LABEL_WIDTH, _LABEL_HEIGHT = 0.16, 0.07
"""Parts of a chart's width and height that a label takes."""


@dataclass(frozen=True)
class _Spot:
    """A trial in the plane: two figures in ms."""

    trial: TrialRecord
    x: float
    y: float


def build_front_charts(record: TuningRecord) -> tuple[Chart, ...]:
    """Returns the plans by init and by readiness against steady runs, and costs by runs per load."""
    spots = _spots(record, lambda figures: figures.init_ms.median)
    if not spots:
        return ()
    charts = [_init_chart(record, spots)]
    if record.front:
        charts += [_ready_chart(record), _cost_chart(record)]
    return tuple(charts)


def _spots(record: TuningRecord, figure: Callable[[TrialFigures], float]) -> tuple[_Spot, ...]:
    found = ((trial, figures_of(trial)) for trial in record.trials)
    spots = (_Spot(trial, figure(one), one.steady_ms.median) for trial, one in found if one is not None)
    return tuple(spot for spot in spots if _is_drawn(spot))


def _is_drawn(spot: _Spot) -> bool:
    return all(value > 0 and math.isfinite(value) for value in (spot.x, spot.y))


def _init_chart(record: TuningRecord, spots: Sequence[_Spot]) -> Chart:
    kept = [spot for spot in spots if not spot.trial.violations]
    front = pareto_front(kept, lambda spot: (spot.x, spot.y, spot.trial.number))
    return _chart(
        record,
        spots,
        front,
        title="Init against steady run",
        axis="init, ms",
        text=f"{count_of(len(spots), 'trial')}, as measured. {_front_text(front)}.",
    )


def _ready_chart(record: TuningRecord) -> Chart:
    trials = {trial.number: trial for trial in record.trials}
    placed = {
        point.trial: _Spot(trials[point.trial], point.first_result_ms, point.steady_ms)
        for point in record.front
        if point.trial in trials
    }
    spots = [
        placed.get(spot.trial.number, spot)
        for spot in _spots(record, lambda figures: figures.ready_ms.median)
    ]
    return _chart(
        record,
        spots,
        tuple(placed.values()),
        title="Ready against steady run: the front of the search",
        axis="ready, ms",
        text=f"{_front_text(tuple(placed.values()))}. Plans of the front are placed by their ratio to the "
        "plan compared with, in the same rounds; the others as measured.",
    )


def _front_text(front: Sequence[_Spot]) -> str:
    if not front:
        return "No plan keeps the limits"
    told = [
        f"trial {one.trial.number} ({format_number(one.x)} ms, {format_number(one.y)} ms per run)"
        for one in front
    ]
    return f"No other plan beats {', '.join(told)} in both figures"


def _chart(
    record: TuningRecord, spots: Sequence[_Spot], front: Sequence[_Spot], *, title: str, axis: str, text: str
) -> Chart:
    ranks = {spot.trial.number: rank for rank, spot in enumerate(front)}
    labelled = _choose_labelled(record, spots, front)
    # The chosen one last, so that it is drawn over the others.
    ordered = sorted(spots, key=lambda spot: spot.trial.number == record.chosen)
    values = tuple(_spot_row(record, spot, ranks, axis, is_labelled=spot in labelled) for spot in ordered)
    columns = (">trial", "~plan", f">{axis}", ">steady run, ms")
    rows = tuple((spot.trial.number, describe_choice(record, spot.trial), spot.x, spot.y) for spot in front)
    table = make_table("Plans that no other beats in both figures", columns, rows)
    return Chart(
        "front", title, text[:1].upper() + text[1:], values, table, {"x": axis, "y": "steady run, ms"}
    )


def _choose_labelled(
    record: TuningRecord, spots: Sequence[_Spot], front: Sequence[_Spot]
) -> tuple[_Spot, ...]:
    """Returns the spots with a label: the chosen one, and those of the front whose labels do not overlap."""
    chosen = [spot for spot in spots if spot.trial.number == record.chosen]
    widths = [
        math.log(max(side) / min(side)) or 1.0 for side in zip(*((s.x, s.y) for s in spots), strict=True)
    ]
    labelled: list[_Spot] = []
    for spot in (*chosen, *front):
        far = (
            abs(math.log(spot.x / one.x)) > _LABEL_WIDTH * widths[0]
            or abs(math.log(spot.y / one.y)) > _LABEL_HEIGHT * widths[1]
            for one in labelled
        )
        if all(far):
            labelled.append(spot)
    return tuple(labelled)


def _spot_row(
    record: TuningRecord, spot: _Spot, ranks: Mapping[int, int], axis: str, *, is_labelled: bool
) -> Mapping[str, Any]:
    number = spot.trial.number
    row: dict[str, Any] = {
        "x": rounded(spot.x),
        "y": rounded(spot.y),
        "what": _what(record, spot.trial, on_front=number in ranks),
        "told": f"trial {number}: {axis.partition(',')[0]} {format_number(spot.x)} ms, "
        f"steady {format_number(spot.y)} ms",
    }
    if number in ranks:
        row |= {"rank": ranks[number]}
    if is_labelled:
        row |= {"label": f"{number}, chosen" if number == record.chosen else str(number)}
    return row


def _what(record: TuningRecord, trial: TrialRecord, *, on_front: bool) -> str:
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


def _cost_chart(record: TuningRecord) -> Chart:
    legs = find_legs(record)
    points = {point.trial: (point.first_result_ms, point.steady_ms) for point in record.front}
    lines = {f"trial {leg.trial}": points[leg.trial] for leg in legs if leg.trial in points}
    default = _default_point(record)
    if default is not None:
        lines["default"] = default
    return Chart(
        kind="costs",
        title="Which plan costs least, by runs per load",
        text=_legs_text(record, legs),
        values=tuple(_cost_rows(lines)),
        table=_legs_table(record, legs),
        parameters={},
        wide=True,
    )


def _default_point(record: TuningRecord) -> tuple[float, float] | None:
    default = next((trial for trial in record.trials if trial.choice.get("plan") == "default"), None)
    figures = figures_of(default) if default is not None else None
    return (figures.ready_ms.median, figures.steady_ms.median) if figures else None


def _cost_rows(lines: Mapping[str, tuple[float, float]]) -> Iterator[Mapping[str, Any]]:
    for runs in RUNS:
        costs = {name: first + (runs - 1) * steady for name, (first, steady) in lines.items()}
        least = min(costs.values(), default=0.0)
        if least <= 0:
            continue
        for name, cost in costs.items():
            told = f"{name} at {count_of(runs, 'run')} per load: {format_number(cost)} ms"
            yield {"runs": runs, "plan": name, "cost": rounded(cost / least), "told": told}


def _legs_text(record: TuningRecord, legs: Sequence[_Leg]) -> str:
    searched = f"The search was for {count_of(record.runs_per_load, 'run')} per load."
    if len(legs) == 1:
        return f"Trial {legs[0].trial} costs least at any number of runs per load. {searched}"
    told = [f"trial {leg.trial} from {count_of(leg.first, 'run')} per load on" for leg in legs]
    return f"Break-even: {'; '.join(told)}. {searched}"


def _legs_table(record: TuningRecord, legs: Sequence[_Leg]) -> ReportTable:
    trials = {trial.number: trial for trial in record.trials}
    columns = (">runs per load, from", ">to", ">trial", "~plan")
    rows = tuple(
        (
            leg.first,
            "any number" if leg.to is None else leg.to,
            leg.trial,
            describe_choice(record, trials[leg.trial]) if leg.trial in trials else "",
        )
        for leg in legs
    )
    return make_table("Break-even runs: which plan costs least", columns, rows)
