"""How plans compare at any number of runs per load: the front, and break-even points. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median

from ortprep.bundle.tuning_record import BreakEvenRecord, FrontRecord
from ortprep.children.probe import ProbeResult
from ortprep.measuring.comparison import pareto_front
from ortprep.tuning.objective import Objective, Trial
from ortprep.tuning.space import PlanChoice


def points_of(
    trials: Sequence[Trial],
    objective: Objective,
    *,
    finals: Mapping[PlanChoice, Sequence[ProbeResult]],
    anchor: PlanChoice,
) -> tuple[FrontRecord, ...]:
    """Returns the points of the plans that keep the limits.

    Plans were measured at different times, on a machine that may have been slower then. So each point is the
    plan's ratio to the anchor, in the same rounds, times the anchor's median. Figures of the last comparison
    take precedence.
    """
    good = [trial for trial in trials if trial.failure is None and trial.figures]
    found = {trial.number: _pairs(trial, finals, anchor) for trial in good}
    anchors = list(finals.get(anchor, ())) or [one for pairs in found.values() for _, one in pairs]
    return tuple(
        FrontRecord(
            number,
            _ratio([(a.ready_ms, b.ready_ms) for a, b in pairs]) * median([one.ready_ms for one in anchors]),
            _ratio([(a.steady_ms, b.steady_ms) for a, b in pairs])
            * median([one.steady_ms for one in anchors]),
        )
        for number, pairs in found.items()
        if not objective.violations(*zip(*pairs, strict=True))
    )


def _pairs(
    trial: Trial, finals: Mapping[PlanChoice, Sequence[ProbeResult]], anchor: PlanChoice
) -> list[tuple[ProbeResult, ProbeResult]]:
    own, other = finals.get(trial.choice, ()), finals.get(anchor, ())
    if own and other:
        return list(zip(own, other, strict=False))  # a plan that left the comparison has fewer
    return list(zip(trial.figures, trial.anchors, strict=True))


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median([value / max(anchor, 1e-6) for value, anchor in pairs])


def find_front(points: Sequence[FrontRecord]) -> tuple[FrontRecord, ...]:
    """Returns the plans that no other beats in both figures, soonest first result first."""
    return pareto_front(points, lambda point: (point.first_result_ms, point.steady_ms, point.trial))


def find_break_evens(front: Sequence[FrontRecord]) -> tuple[BreakEvenRecord, ...]:
    """Returns where the cheapest plan of a front changes with the number of runs, fewest runs first."""
    found = []
    for sooner, steadier in itertools.pairwise(_cheapest_somewhere(front)):
        lead_ms = steadier.first_result_ms - sooner.first_result_ms
        gain_ms = sooner.steady_ms - steadier.steady_ms
        if gain_ms > 0:
            found.append(BreakEvenRecord(sooner.trial, steadier.trial, 2 + int(lead_ms / gain_ms)))
    return tuple(found)


def _cheapest_somewhere(front: Sequence[FrontRecord]) -> list[FrontRecord]:
    """Returns the plans that cost least at some number of runs: the corners of the front's convex hull."""
    corners: list[FrontRecord] = []
    for point in front:
        while len(corners) > 1 and not _bends(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    return corners


def _bends(left: FrontRecord, middle: FrontRecord, right: FrontRecord) -> bool:
    """Says whether the middle one lies below the line between its neighbours."""
    there = (middle.steady_ms - left.steady_ms) * (right.first_result_ms - left.first_result_ms)
    line = (right.steady_ms - left.steady_ms) * (middle.first_result_ms - left.first_result_ms)
    return there < line
