"""How plans compare at any number of runs per load: the front, and where one overtakes another. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.tuning.objective import Figures, Objective, Trial
from pipeline.tuning.space import Choice


@dataclass(frozen=True)
class Point:
    """A plan's place in the plane of first result, from the start of the process, and steady run, in ms."""

    number: int
    first_result_ms: float
    steady_ms: float


def points_of(
    trials: Sequence[Trial],
    objective: Objective,
    *,
    finals: Mapping[Choice, Sequence[Figures]],
    anchor: Choice,
) -> tuple[Point, ...]:
    """Returns where the plans are that keep the limits.

    Plans were measured at different times, on a machine that may have been slower then: each is placed by its
    ratio to the plan compared with, in the same rounds, times that plan's median.

    Args:
        trials: Every plan that was tried; those that failed have no place.
        objective: What limits there are.
        finals: Figures of the last comparison, which count before those of a trial.
        anchor: The plan the others are compared with.
    """
    good = [trial for trial in trials if trial.failure is None and trial.figures]
    found = {trial.number: _pairs(trial, finals, anchor) for trial in good}
    anchors = list(finals.get(anchor, ())) or [one for pairs in found.values() for _, one in pairs]
    return tuple(
        Point(
            number,
            _ratio([(a.ready_ms, b.ready_ms) for a, b in pairs]) * median([one.ready_ms for one in anchors]),
            _ratio([(a.steady_ms, b.steady_ms) for a, b in pairs])
            * median([one.steady_ms for one in anchors]),
        )
        for number, pairs in found.items()
        if not objective.violations(*zip(*pairs, strict=True))
    )


def _pairs(
    trial: Trial, finals: Mapping[Choice, Sequence[Figures]], anchor: Choice
) -> list[tuple[Figures, Figures]]:
    own, other = finals.get(trial.choice, ()), finals.get(anchor, ())
    if own and other:
        return list(zip(own, other, strict=False))  # a plan that left the comparison has fewer
    return list(zip(trial.figures, trial.anchors, strict=True))


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median([value / max(anchor, 1e-6) for value, anchor in pairs])


def find_front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Returns the plans that no other beats in both figures, soonest first result first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.first_result_ms, p.steady_ms, p.number)):
        if not front or point.steady_ms < front[-1].steady_ms:
            front.append(point)
    return tuple(front)


@dataclass(frozen=True)
class BreakEven:
    """From how many runs per load on one plan costs less than another.

    Attributes:
        sooner: Trial with the sooner first result.
        steadier: Trial with the shorter run.
        runs: Smallest number of runs per load at which `steadier` costs less.
    """

    sooner: int
    steadier: int
    runs: int


def find_break_evens(front: Sequence[Point]) -> tuple[BreakEven, ...]:
    """Returns where the cheapest plan of a front changes with the number of runs, fewest runs first."""
    found = []
    for sooner, steadier in itertools.pairwise(_cheapest_somewhere(front)):
        lead_ms = steadier.first_result_ms - sooner.first_result_ms
        gain_ms = sooner.steady_ms - steadier.steady_ms
        if gain_ms > 0:
            found.append(BreakEven(sooner.number, steadier.number, 2 + int(lead_ms / gain_ms)))
    return tuple(found)


def _cheapest_somewhere(front: Sequence[Point]) -> list[Point]:
    """Returns the plans that cost least at some number of runs: the corners of the front's convex hull."""
    corners: list[Point] = []
    for point in front:
        while len(corners) > 1 and not _bends(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    return corners


def _bends(left: Point, middle: Point, right: Point) -> bool:
    """Says whether the middle one lies below the line between its neighbours."""
    there = (middle.steady_ms - left.steady_ms) * (right.first_result_ms - left.first_result_ms)
    line = (right.steady_ms - left.steady_ms) * (middle.first_result_ms - left.first_result_ms)
    return there < line
