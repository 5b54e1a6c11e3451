"""The last comparison: the best plans race until one is ahead, all are alike, or the time is up. Pure.

Every round measures the baseline, which is default ONNX Runtime, and each remaining plan once. A plan that is
behind the leader beyond the noise leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ortprep.children.probe import ProbeResult
from ortprep.errors import PipelineError
from ortprep.measuring.comparison import FROM_MAD, MIN_ROUNDS, PRECISION, centre, paired_ratio
from ortprep.measuring.rounds import order_of_round
from ortprep.tuning.first_phase import SAME_COST_RATIO, find_first, pair_costs
from ortprep.tuning.objective import Finals, Objective
from ortprep.tuning.space import DEFAULT, PlanChoice

CONFIDENCE = 2.5
"""Standard errors that a plan has to be behind before it leaves."""


@dataclass(frozen=True)
class CostRanking:
    """Costs of the plans relative to the leader.

    Attributes:
        behind: Logarithm of the cost ratio of each other plan to the leader.
        error: Standard error of such a logarithm.
    """

    leader: PlanChoice
    behind: Mapping[PlanChoice, float]
    error: float

    def candidates(self) -> tuple[PlanChoice, ...]:
        """Returns the plans that may still cost least, the leader first."""
        close = (choice for choice, log in self.behind.items() if log <= CONFIDENCE * self.error)
        return (self.leader, *close)

    def is_close(self) -> bool:
        """Says whether another round could still change the choice."""
        others = [log for log in self.behind.values() if log <= CONFIDENCE * self.error]
        alike = math.log(SAME_COST_RATIO)
        return any(log > alike for log in others) or (bool(others) and self.error > alike)


def rank(costs: Mapping[PlanChoice, Sequence[float]]) -> CostRanking:
    """Returns how plans rank that were in every round; the costs are round by round."""
    logs = {choice: [math.log(max(cost, 1e-12)) for cost in of_plan] for choice, of_plan in costs.items()}
    levels = [median(column) for column in zip(*logs.values(), strict=True)]
    relative = {choice: [a - b for a, b in zip(log, levels, strict=True)] for choice, log in logs.items()}
    centres = {choice: centre(log) for choice, log in relative.items()}
    leader = min(centres, key=lambda choice: centres[choice])
    behind = {
        choice: math.log(paired_ratio(of_plan, costs[leader]))
        for choice, of_plan in costs.items()
        if choice != leader
    }
    rests = [abs(log - centres[choice]) for choice, of_plan in relative.items() for log in of_plan]
    return CostRanking(leader, behind, _error(median(rests), plans=len(costs), rounds=len(levels)))


def _error(rest: float, *, plans: int, rounds: int) -> float:
    """Returns the standard error of a difference of two plans.

    `rest` is the median of what is left of the logarithms once rounds and plans are accounted for: the fewer
    of these, the more noise went into their levels.
    """
    if not rest:
        return 0.0
    left = (1 - 1 / plans) * (1 - 1 / rounds)
    return FROM_MAD * rest / math.sqrt(left) * math.sqrt(2 / rounds) * PRECISION


def pick_entrants(
    candidates: Sequence[PlanChoice], firsts: Sequence[PlanChoice], *, max_plans: int
) -> tuple[tuple[PlanChoice, ...], tuple[PlanChoice, ...]]:
    """Returns the candidates and the first-phase plans of a comparison of at most `max_plans` plans.

    There are always two candidates and a first-phase plan. The best plans come first in both sequences.
    """
    chosen = tuple(dict.fromkeys(candidates))[: max(2, max_plans - 1)]
    others = tuple(choice for choice in dict.fromkeys(firsts) if choice not in chosen)
    return chosen, others[: max(1, max_plans - 1 - len(chosen))]


def compare_finalists(
    baseline: PlanChoice,
    candidates: Sequence[PlanChoice],
    firsts: Sequence[PlanChoice],
    objective: Objective,
    *,
    measure: Callable[[PlanChoice], ProbeResult],
    has_time: Callable[[int], bool],
) -> Finals:
    """Measures plans in rounds and returns the figures of each; one that fails is absent.

    All are compared with the baseline, which stays to the end. First-phase plans leave after `MIN_ROUNDS`
    unless a candidate uses them.

    Args:
        baseline: Default ONNX Runtime, or the base plan where that does not run.
        candidates: Plans to choose from, the best first.
        firsts: Plans that may serve before one of them.
        objective: Costs, limits and the maximum number of rounds.
        measure: Measures a plan once; a `PipelineError` is its failure.
        has_time: Says whether there is time for that many more processes; asked from `MIN_ROUNDS` on.
    """
    running = list(dict.fromkeys((baseline, *candidates, *firsts)))
    figures: dict[PlanChoice, list[ProbeResult]] = {choice: [] for choice in running}
    for index in range(objective.rounds):
        if index >= MIN_ROUNDS:
            # A plan that is behind leaves, with the first phase that served it.
            left = {choice: figures[choice] for choice in running}
            pairs = _find_pairs(baseline, candidates, objective, left)
            if not pairs:
                break
            ranking = rank(
                {second: pair_costs(figures, first, second, objective) for second, first in pairs.items()}
            )
            close = ranking.candidates()
            stay = {baseline, *close, *(pairs[choice] for choice in close)}
            running = [choice for choice in running if choice in stay]
            if not has_time(len(running)) or not ranking.is_close():
                break
        for choice in order_of_round(running, index):
            try:
                figures[choice].append(measure_with_retry(measure, choice))
            except PipelineError:
                running.remove(choice)
                if choice != baseline:  # the rounds it was in still count
                    del figures[choice]
    return {choice: tuple(of_plan) for choice, of_plan in figures.items() if of_plan}


def measure_with_retry(measure: Callable[[PlanChoice], ProbeResult], choice: PlanChoice) -> ProbeResult:
    """Measures a plan; retries default ONNX Runtime once.

    A plan that fails now and then must not be adopted. The default is no candidate, and every plan is
    compared with it.

    Raises:
        PipelineError: The measurement failed.
    """
    try:
        return measure(choice)
    except PipelineError:
        if choice != DEFAULT:
            raise
    return measure(choice)


def _find_pairs(
    baseline: PlanChoice, candidates: Sequence[PlanChoice], objective: Objective, finals: Finals
) -> dict[PlanChoice, PlanChoice]:
    """Returns the remaining candidates, each with its first-phase plan; none once the baseline has failed."""
    left = [choice for choice in finals if choice in candidates and baseline in finals]
    allowed = [choice for choice in left if not objective.violations(finals[choice], finals[baseline])]
    return {choice: find_first(finals, choice, objective) for choice in allowed or left}
