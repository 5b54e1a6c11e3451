"""First-phase plans: which plan serves until another is ready, and the cost of both. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from statistics import median

from ortprep.children.probe import ProbeResult
from ortprep.measuring.comparison import MIN_ROUNDS, is_below, paired_ratio
from ortprep.tuning.knobs import needs_binding, shares_files
from ortprep.tuning.objective import Finals, Objective, Trial
from ortprep.tuning.space import DEFAULT, PlanChoice

SAME_READY_RATIO = 1.03
"""Plans that are ready within this factor, and not apart beyond the noise, count as equally fast."""

SAME_COST_RATIO = 1.01
"""Plans whose costs are this close cost the same."""

MAX_FIRST_PHASE_RATIO = 1 / 1.5
"""A first-phase plan is ready within this part of the second plan's time: two sessions have to pay."""

MAX_OWN_FILES_RATIO = 0.95
"""One with files of its own is also ready within this part of the time of the best one without."""

Reader = Callable[[ProbeResult], float]
ready_ms: Reader = attrgetter("ready_ms")
steady_ms: Reader = attrgetter("steady_ms")


def find_first(finals: Finals, second: PlanChoice, objective: Objective) -> PlanChoice:
    """Returns the plan that serves until `second` is ready: `second` itself if no other is worth it.

    It is ready sooner beyond the noise, both sessions together keep the memory limits, and both cost a job no
    more than either alone. `second` has `MIN_ROUNDS` rounds at least.
    """
    first = second
    if not objective.first_phase or needs_binding(second):
        # A binding stays with the session it was made of, so a job that binds would never see another.
        return first
    others = [choice for choice in finals if _may_serve_before(finals, choice, second, objective)]
    for group in ([choice for choice in others if shares_files(choice, second)], others):
        for choice in find_soonest(finals, group)[:1]:
            is_sooner = is_less(finals[choice], finals[first], ready_ms)
            pays = ratio(finals[choice], finals[second], ready_ms) <= MAX_FIRST_PHASE_RATIO
            if is_sooner and pays and ratio(finals[choice], finals[first], ready_ms) <= MAX_OWN_FILES_RATIO:
                first = choice
    return first


def _may_serve_before(finals: Finals, first: PlanChoice, second: PlanChoice, objective: Objective) -> bool:
    if first in (second, DEFAULT) or needs_binding(first) or len(finals[first]) < MIN_ROUNDS:
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


def rank_firsts(trials: Iterable[Trial], second: PlanChoice, objective: Objective) -> tuple[PlanChoice, ...]:
    """Returns the first-phase candidates to compare with `second`, of the plans that were tried.

    These are the two that were ready soonest, and the soonest one that needs no files of its own.
    """
    if not objective.first_phase:
        return ()
    # The time of a first-phase plan's runs does not matter.
    sooner = Objective.of(objective, runs_per_load=1, max_steady_ratio=None)
    own = (trial for trial in trials if trial.choice != DEFAULT and sooner.is_allowed(trial))
    ranked = [trial.choice for trial in sorted(own, key=sooner.score)]
    alike = [choice for choice in ranked if shares_files(choice, second)]
    return tuple(dict.fromkeys([*ranked[:1], *alike[:1], *ranked[1:2]]))


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


def ratio(figures: Sequence[ProbeResult], others: Sequence[ProbeResult], read: Reader) -> float:
    """Returns the ratio of a figure of two plans in their common rounds."""
    return paired_ratio(*_values(figures, others, read))


def is_less(figures: Sequence[ProbeResult], others: Sequence[ProbeResult], read: Reader) -> bool:
    """Says whether a figure of one plan is smaller beyond the noise, in their common rounds."""
    return is_below(*_values(figures, others, read))


def _median(figures: Sequence[ProbeResult], read: Reader) -> float:
    return median([read(one) for one in figures])


def _values(
    figures: Sequence[ProbeResult], others: Sequence[ProbeResult], read: Reader
) -> tuple[list[float], list[float]]:
    rounds = min(len(figures), len(others))
    return [read(one) for one in figures[:rounds]], [read(one) for one in others[:rounds]]
