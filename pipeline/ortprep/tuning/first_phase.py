"""First-phase plans: which plan serves until another is ready, and the cost of both. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from statistics import median

from ortprep.children.probe import ProbeResult
from ortprep.measuring.comparison import MIN_ROUNDS
from ortprep.tuning.knobs import needs_binding, shares_files
from ortprep.tuning.objective import Finals, Objective, Reader, Trial, is_less, ratio, ready_ms, steady_ms
from ortprep.tuning.space import DEFAULT, PlanChoice

SAME_READY_RATIO = 1.03
"""Plans that are ready within this factor, and not apart beyond the noise, count as equally fast."""

SAME_COST_RATIO = 1.01
"""Plans whose costs are this close cost the same."""

MAX_FIRST_PHASE_RATIO = 1 / 1.5
"""A first-phase plan is ready within this part of the second plan's time: two sessions have to pay."""


def find_first(finals: Finals, second: PlanChoice, objective: Objective) -> PlanChoice:
    """Returns the plan that serves until `second` is ready: `second` itself if no other is worth it.

    It is loaded from the same files and ready sooner beyond the noise, both sessions together keep the memory
    limits, and both cost a job no more than either alone. `second` has `MIN_ROUNDS` rounds at least.
    """
    others = [choice for choice in finals if _may_serve_before(finals, choice, second, objective)]
    for first in find_soonest(finals, others)[:1]:
        pays = ratio(finals[first], finals[second], ready_ms) <= MAX_FIRST_PHASE_RATIO
        if pays and is_less(finals[first], finals[second], ready_ms):
            return first
    return second


def _may_serve_before(finals: Finals, first: PlanChoice, second: PlanChoice, objective: Objective) -> bool:
    """Says whether a plan can be a first phase of another, and the two together cost no more than either."""
    # A binding stays with the session it was made of, so a job that binds would never see another.
    if not objective.first_phase or needs_binding(first) or needs_binding(second):
        return False
    if first in (second, DEFAULT) or not shares_files(first, second) or len(finals[first]) < MIN_ROUNDS:
        return False
    gpu_mb = sum(_median(finals[choice], lambda one: one.gpu_mb or 0.0) for choice in (first, second))
    limits = (
        (overlap_mb(finals, first, second), objective.max_private_mb),
        (gpu_mb, objective.max_gpu_mb),
    )
    if any(limit is not None and value > limit for value, limit in limits):
        return False
    both, alone = (median(pair_costs(finals, choice, second, objective)) for choice in (first, second))
    # Where a job is over before the second session is made, there is no use in one.
    return both <= SAME_COST_RATIO * alone and both < median(pair_costs(finals, first, first, objective))


def rank_firsts(
    trials: Iterable[Trial], seconds: Sequence[PlanChoice], objective: Objective
) -> tuple[PlanChoice, ...]:
    """Returns the plan that is ready soonest, of those that were tried, on the files of each of `seconds`."""
    if not objective.first_phase:
        return ()
    # The time of a first-phase plan's runs does not matter.
    sooner = Objective.of(objective, runs_per_load=1, max_steady_ratio=None)
    own = (trial for trial in trials if trial.choice != DEFAULT and sooner.is_allowed(trial))
    ranked = [trial.choice for trial in sorted(own, key=sooner.score)]
    firsts = [[choice for choice in ranked if shares_files(choice, second)][:1] for second in seconds]
    return tuple(dict.fromkeys(choice for found in firsts for choice in found))


def find_soonest(finals: Finals, choices: Iterable[PlanChoice]) -> tuple[PlanChoice, ...]:
    """Returns the plans that are ready soonest within the noise, those with the shortest runs first."""
    ready = {choice: _median(finals[choice], ready_ms) for choice in choices}
    if not ready:
        return ()
    soonest = finals[min(ready, key=lambda choice: ready[choice])]
    level = [
        choice
        for choice in ready
        if not is_less(soonest, finals[choice], ready_ms)
        and ratio(finals[choice], soonest, ready_ms) <= SAME_READY_RATIO
    ]
    return tuple(sorted(level, key=lambda choice: _median(finals[choice], steady_ms)))


def pair_costs(finals: Finals, first: PlanChoice, second: PlanChoice, objective: Objective) -> list[float]:
    """Returns the costs of two plans together in their common rounds; for one plan alone, pass it twice."""
    pairs = zip(finals[first], finals[second], strict=False)
    return [objective.pair_cost_ms(one, other) for one, other in pairs]


def overlap_mb(finals: Finals, first: PlanChoice, second: PlanChoice) -> float:
    """Returns the private memory of both sessions; interpreter and libraries count twice."""
    return sum(_median(finals[choice], attrgetter("private_mb")) for choice in (first, second))


def _median(figures: Sequence[ProbeResult], read: Reader) -> float:
    return median([read(one) for one in figures])
