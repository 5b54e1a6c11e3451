"""Which of the finalists is chosen, which plan may come before it, and why. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.tuning.comparison import ratio_of_medians, separated
from pipeline.tuning.objective import Figures, Objective
from pipeline.tuning.search import Found, find_twins
from pipeline.tuning.space import DEFAULT, Choice, Space

ALIKE = 1.01
"""Plans whose costs are this close, and not apart beyond the noise, cost the same."""

AS_SOON = 1.03
"""First results this close, and not apart beyond the noise, come as soon."""

STEADY_ALLOWANCE = 1.02
"""How much longer a run may be where a plan is adopted for its first result alone."""

WORTH_A_PHASE = 0.8
"""A first plan has to give its first result in this part of the steady plan's time."""

Finals = Mapping[Choice, Sequence[Figures]]


@dataclass(frozen=True)
class Verdict:
    """What a search comes to.

    Attributes:
        choice: The plan to prepare; where nothing beat the default, the base, or, if that fails, what works.
        beats_default: Whether it costs less than default ONNX Runtime beyond the noise.
        reason: One sentence with the figures.
        first_phase: A plan over the same files with a sooner first result, None if there is none.
        overlap_mb: Private memory of both sessions while they overlap, in MB of 2**20 bytes.
    """

    choice: Choice
    beats_default: bool
    reason: str
    first_phase: Choice | None = None
    overlap_mb: float | None = None


def choose(space: Space, objective: Objective, found: Found) -> Verdict:
    """Chooses among the plans that were measured afresh.

    A plan is adopted only if it beats the anchor beyond the noise: it costs less, or its first result comes
    sooner and its runs take no longer. Of the plans that cost as little as the cheapest, one with the soonest
    first result is taken, and of several such the one that changes least.

    Args:
        space: What could be chosen.
        objective: What a plan costs and must not exceed.
        found: The search.
    """
    anchor = found.finals.get(found.anchor, ())
    own = {choice: figures for choice, figures in found.finals.items() if choice != DEFAULT}
    allowed = {c: f for c, f in own.items() if anchor and not objective.violations(f, anchor)}
    adopted = {c: f for c, f in allowed.items() if c == found.anchor or beats(f, anchor, objective)}
    if not adopted:
        choice = _unadopted(space, own, objective)
        return Verdict(choice, beats_default=False, reason=_nothing_better(space, own, objective, found))
    cheapest = min(adopted, key=lambda choice: _cost(adopted[choice], objective))
    level = {c: f for c, f in adopted.items() if _is_level(f, adopted[cheapest], objective)}
    best = _plainest(space, _soonest(level), objective)
    first, overlap_mb = _first_phase(space, objective, own, best)
    return Verdict(
        choice=best,
        beats_default=found.anchor == DEFAULT,
        reason=f"{space.describe(best)}: {_figures(adopted[best], anchor, objective)}",
        first_phase=first,
        overlap_mb=overlap_mb,
    )


def beats(figures: Sequence[Figures], anchor: Sequence[Figures], objective: Objective) -> bool:
    """Says whether a plan is better than the anchor beyond the noise; both of the same rounds."""
    costs = [objective.cost_ms(one) for one in figures], [objective.cost_ms(one) for one in anchor]
    if separated(*costs):
        return True
    first = [one.first_result_ms for one in figures], [one.first_result_ms for one in anchor]
    steady = [one.steady_ms for one in figures], [one.steady_ms for one in anchor]
    longer = separated(steady[1], steady[0]) and ratio_of_medians(*steady) > STEADY_ALLOWANCE
    dearer = separated(costs[1], costs[0])
    return separated(*first) and not longer and not dearer


def _unadopted(space: Space, own: Finals, objective: Objective) -> Choice:
    if not own or space.base in own:
        return space.base
    return min(own, key=lambda choice: _cost(own[choice], objective))


def _cost(figures: Sequence[Figures], objective: Objective) -> float:
    return median([objective.cost_ms(one) for one in figures])


def _first_result(figures: Sequence[Figures]) -> float:
    return median([one.first_result_ms for one in figures])


def _is_level(figures: Sequence[Figures], cheapest: Sequence[Figures], objective: Objective) -> bool:
    costs = [objective.cost_ms(one) for one in cheapest], [objective.cost_ms(one) for one in figures]
    return not separated(*costs) and ratio_of_medians(costs[1], costs[0]) <= ALIKE


def _soonest(level: Finals) -> Finals:
    soonest = min(level, key=lambda choice: _first_result(level[choice]))
    times = {choice: [one.first_result_ms for one in figures] for choice, figures in level.items()}
    return {
        choice: level[choice]
        for choice, of_choice in times.items()
        if not separated(times[soonest], of_choice) and ratio_of_medians(of_choice, times[soonest]) <= AS_SOON
    }


def _plainest(space: Space, level: Finals, objective: Objective) -> Choice:
    base = set(space.base.values)
    return min(level, key=lambda c: (len(set(c.values) - base), _cost(level[c], objective)))


def _first_phase(
    space: Space, objective: Objective, finals: Finals, best: Choice
) -> tuple[Choice | None, float | None]:
    """Returns the twin of the chosen plan with the soonest first result, and both sessions' memory."""
    twins = [twin for twin in find_twins(space, best) if twin in finals]
    if not twins:
        return None, None
    twin = min(twins, key=lambda choice: _first_result(finals[choice]))
    sooner = [one.first_result_ms for one in finals[twin]], [one.first_result_ms for one in finals[best]]
    if not separated(*sooner) or ratio_of_medians(*sooner) > WORTH_A_PHASE:
        return None, None
    # Interpreter and libraries are counted twice: the true figure is below.
    overlap_mb = sum(median([one.private_mb for one in finals[choice]]) for choice in (best, twin))
    gpu_mb = sum(median([one.gpu_mb or 0.0 for one in finals[choice]]) for choice in (best, twin))
    limits = ((overlap_mb, objective.max_private_mb), (gpu_mb, objective.max_gpu_mb))
    if any(limit is not None and value > limit for value, limit in limits):
        return None, None
    return twin, overlap_mb


def _figures(figures: Sequence[Figures], anchor: Sequence[Figures], objective: Objective) -> str:
    ratios = {
        "cost": ratio_of_medians(*_pairs(figures, anchor, objective.cost_ms)),
        "first result": ratio_of_medians(*_pairs(figures, anchor, lambda one: one.first_result_ms)),
        "steady run": ratio_of_medians(*_pairs(figures, anchor, lambda one: one.steady_ms)),
    }
    told = ", ".join(f"{name} {ratio:.3g}×" for name, ratio in ratios.items())
    return f"{told} of the default's at {objective.runs_per_load} runs per load"


def _pairs(
    figures: Sequence[Figures], anchor: Sequence[Figures], read: Callable[[Figures], float]
) -> tuple[list[float], list[float]]:
    return [read(one) for one in figures], [read(one) for one in anchor]


def _nothing_better(space: Space, own: Finals, objective: Objective, found: Found) -> str:
    anchor = found.finals.get(found.anchor, ())
    if not anchor:
        return "nothing beat the default: it failed in the last comparison"
    if not own:
        return "nothing beat the default: no other plan could be measured"
    best = min(own, key=lambda choice: _cost(own[choice], objective))
    limits = objective.violations(own[best], anchor)
    why = f", beyond its limits ({'; '.join(limits)})" if limits else ""
    told = _figures(own[best], anchor, objective)
    return f"nothing beat the default: the best, {space.describe(best)}, has {told}{why}"
