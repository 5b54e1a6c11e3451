"""The last comparison: the best plans race until one is ahead, all are alike, or the time is up. Pure.

Every round measures default ONNX Runtime and each remaining plan once. A plan that is behind the leader
beyond the noise leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from ortprep.children.probe import ProbeResult
from ortprep.errors import PipelineError
from ortprep.measuring.comparison import MIN_ROUNDS, is_below, paired_ratio, ratio_interval
from ortprep.measuring.rounds import order_of_round
from ortprep.tuning.objective import Finals, Objective
from ortprep.tuning.phases import SAME_COST_RATIO, find_first, pair_costs
from ortprep.tuning.space import DEFAULT, PlanChoice

Costs = Mapping[PlanChoice, Sequence[float]]
"""What plans cost in ms, round by round."""


def find_cheapest(costs: Costs) -> PlanChoice:
    """Returns the plan that costs least of those that were in every round."""
    # What slows a machine down in one round raises the level of all plans of it.
    levels = [median(column) for column in zip(*costs.values(), strict=True)]
    return min(costs, key=lambda choice: paired_ratio(costs[choice], levels))


def is_level(costs: Sequence[float], cheapest: Sequence[float]) -> bool:
    """Says whether a plan costs the same as the cheapest one, as far as that was measured."""
    return not is_below(cheapest, costs) and paired_ratio(costs, cheapest) <= SAME_COST_RATIO


def pick_entrants(
    contenders: Sequence[PlanChoice], firsts: Sequence[PlanChoice], *, most: int
) -> tuple[tuple[PlanChoice, ...], tuple[PlanChoice, ...]]:
    """Returns the contenders and the first-phase candidates of a comparison of at most `most` plans.

    There are always two contenders and a first-phase candidate. The best plans come first in both sequences.
    """
    chosen = tuple(dict.fromkeys(contenders))[: max(2, most - 1)]
    others = tuple(choice for choice in dict.fromkeys(firsts) if choice not in chosen)
    return chosen, others[: max(1, most - 1 - len(chosen))]


def compare_finalists(
    anchor: PlanChoice,
    contenders: Sequence[PlanChoice],
    firsts: Sequence[PlanChoice],
    objective: Objective,
    *,
    most_rounds: int,
    measure: Callable[[PlanChoice], ProbeResult],
    has_time: Callable[[int], bool],
) -> Finals:
    """Measures plans in rounds and returns the figures of each; one that fails is absent.

    All are compared with the anchor, which stays to the end. First-phase candidates leave after `MIN_ROUNDS`
    unless a contender uses them.
    `has_time` says whether there is time for that many more processes; it is asked from `MIN_ROUNDS` on.
    """
    running = list(dict.fromkeys((anchor, *contenders, *firsts)))
    figures: dict[PlanChoice, list[ProbeResult]] = {choice: [] for choice in running}
    for index in range(most_rounds):
        if index >= MIN_ROUNDS:
            if anchor not in running:
                break
            pairs = _find_pairs(anchor, contenders, objective, figures, running)
            costs = _costs(pairs, objective, figures)
            cheapest = costs[find_cheapest(costs)] if costs else ()
            left = [choice for choice in costs if not is_below(cheapest, costs[choice])]
            stay = {anchor, *left, *(pairs[choice] for choice in left)}
            running = [choice for choice in running if choice in stay]
            pairs = _find_pairs(anchor, contenders, objective, figures, running)
            if not has_time(len(running)) or not _is_open(anchor, pairs, objective, figures):
                break
        for choice in order_of_round(running, index):
            try:
                figures[choice].append(measure_with_retry(measure, choice))
            except PipelineError:
                running.remove(choice)
                if choice != anchor:  # the rounds it was in still count
                    del figures[choice]
    return {choice: tuple(of_plan) for choice, of_plan in figures.items() if of_plan}


def measure_with_retry(measure: Callable[[PlanChoice], ProbeResult], choice: PlanChoice) -> ProbeResult:
    """Measures a plan; retries default ONNX Runtime once.

    A plan that fails now and then must not be adopted. The default is no candidate, and every plan is
    compared with it.

    Raises:
        PipelineError: It failed.
    """
    try:
        return measure(choice)
    except PipelineError:
        if choice != DEFAULT:
            raise
    return measure(choice)


def _find_pairs(
    anchor: PlanChoice,
    contenders: Sequence[PlanChoice],
    objective: Objective,
    figures: Finals,
    running: Sequence[PlanChoice],
) -> dict[PlanChoice, PlanChoice]:
    """Returns the remaining contenders, each with its first-phase plan."""
    finals = {choice: figures[choice] for choice in running}
    left = [choice for choice in running if choice in contenders]
    allowed = [choice for choice in left if not objective.violations(finals[choice], finals[anchor])]
    return {choice: find_first(finals, choice, objective) for choice in allowed or left}


def _costs(
    pairs: Mapping[PlanChoice, PlanChoice], objective: Objective, figures: Finals
) -> dict[PlanChoice, list[float]]:
    return {second: pair_costs(figures, first, second, objective) for second, first in pairs.items()}


def _is_open(
    anchor: PlanChoice, pairs: Mapping[PlanChoice, PlanChoice], objective: Objective, figures: Finals
) -> bool:
    """Says whether the cheapest plan is still unclear, or whether it beats the anchor."""
    costs = _costs(pairs, objective, figures)
    if not costs:
        return False
    cheapest = find_cheapest(costs)
    others = [costs[choice] for choice in costs if choice != cheapest]
    if any(ratio_interval(one, costs[cheapest], errors=1)[1] > SAME_COST_RATIO for one in others):
        return True
    if cheapest == anchor:
        return False
    theirs, own = ([objective.cost_ms(one) for one in figures[c]] for c in (anchor, cheapest))
    return not is_below(own, theirs) and not is_below(theirs, own)
