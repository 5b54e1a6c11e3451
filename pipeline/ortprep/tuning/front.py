"""How plans compare at any number of runs per load: the front, and break-even points. Pure."""

from __future__ import annotations

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
    found: list[BreakEvenRecord] = []
    cheapest = front[0] if front else None
    while cheapest is not None:
        # From how many runs on each plan with shorter runs makes up for its later first result.
        runs = {
            other: (other.first_result_ms - cheapest.first_result_ms) / (cheapest.steady_ms - other.steady_ms)
            for other in front
            if other.steady_ms < cheapest.steady_ms
        }
        following = min(runs, key=lambda other: (runs[other], other.steady_ms), default=None)
        if following is not None:
            found.append(BreakEvenRecord(cheapest.trial, following.trial, 2 + int(runs[following])))
        cheapest = following
    return tuple(found)
