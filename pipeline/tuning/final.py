"""The last comparison: the best plans race until one is ahead, all are alike, or the time is up.

Every round measures default ONNX Runtime and each plan still in the race once. A plan that is behind the
leader beyond the noise leaves for good, so that the processes go where the decision is close. No clock, disk
or process in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.errors import PipelineError
from pipeline.measuring.comparison import FROM_MAD, LEAST_ROUNDS, PRECISION, centre, is_below, paired_ratio
from pipeline.measuring.rounds import order_of_round
from pipeline.tuning.objective import Figures, Finals, Objective
from pipeline.tuning.phases import ALIKE, find_first, pair_costs
from pipeline.tuning.space import DEFAULT, Choice

CONFIDENCE = 2.5
"""Standard errors that a plan has to be behind before it leaves."""


@dataclass(frozen=True)
class Standing:
    """How the plans stand.

    Attributes:
        leader: The plan that costs least.
        behind: How much more each of the others costs: logarithm of the ratio to the leader.
        error: Standard error of such a logarithm.
    """

    leader: Choice
    behind: Mapping[Choice, float]
    error: float

    def contenders(self) -> tuple[Choice, ...]:
        """Returns the plans that may yet turn out to cost least, the leader first."""
        close = (choice for choice, log in self.behind.items() if log <= CONFIDENCE * self.error)
        return (self.leader, *close)

    def is_close(self) -> bool:
        """Says whether another round could still change what is chosen."""
        others = [log for log in self.behind.values() if log <= CONFIDENCE * self.error]
        alike = math.log(ALIKE)
        return any(log > alike for log in others) or (bool(others) and self.error > alike)


def rank(costs: Mapping[Choice, Sequence[float]]) -> Standing:
    """Returns how plans stand that were in every round.

    Args:
        costs: At least one plan's costs, round by round, as many of each.
    """
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
    return Standing(leader, behind, _error(median(rests), plans=len(costs), rounds=len(levels)))


def _error(rest: float, *, plans: int, rounds: int) -> float:
    """Returns the standard error of a difference of two plans.

    Args:
        rest: Median of what is left of the figures' logarithms once rounds and plans are accounted for.
        plans: How many there are: the fewer, the more of their noise went into the levels of rounds.
        rounds: How many there are, likewise.
    """
    if not rest:
        return 0.0
    left = (1 - 1 / plans) * (1 - 1 / rounds)
    return FROM_MAD * rest / math.sqrt(left) * math.sqrt(2 / rounds) * PRECISION


@dataclass(frozen=True)
class Lanes:
    """Who takes part.

    Attributes:
        anchor: The plan all others are compared with; it stays to the end.
        contenders: Plans one of which is chosen.
        firsts: Plans one of which may serve before that: the others leave after the least rounds.
    """

    anchor: Choice
    contenders: tuple[Choice, ...]
    firsts: tuple[Choice, ...] = ()

    @property
    def all(self) -> tuple[Choice, ...]:
        """Everyone, once."""
        return tuple(dict.fromkeys((self.anchor, *self.contenders, *self.firsts)))


def pick_lanes(anchor: Choice, contenders: Sequence[Choice], firsts: Sequence[Choice], *, most: int) -> Lanes:
    """Returns who takes part where there is time for `most` plans; two contenders and a first in any case.

    Args:
        anchor: The plan all others are compared with.
        contenders: Plans one of which is chosen, dearest to lose first.
        firsts: Plans that may serve before a contender, soonest ready first.
        most: Plans, the anchor included.
    """
    chosen = tuple(dict.fromkeys(contenders))[: max(2, most - 1)]
    others = tuple(choice for choice in dict.fromkeys(firsts) if choice not in chosen)
    return Lanes(anchor, chosen, others[: max(1, most - 1 - len(chosen))])


def compare_afresh(
    lanes: Lanes,
    objective: Objective,
    *,
    most_rounds: int,
    measure: Callable[[Choice], Figures],
    has_time: Callable[[int], bool],
) -> Finals:
    """Measures plans in rounds and returns what each was measured at; one that fails is absent.

    Args:
        lanes: Who takes part.
        objective: What decides.
        most_rounds: Rounds after which it ends in any case.
        measure: Measures a plan in a fresh process; a `PipelineError` is a failure.
        has_time: Says whether there is time for that many more processes; not asked before the least rounds
            are over.
    """
    figures: dict[Choice, list[Figures]] = {choice: [] for choice in lanes.all}
    running = list(lanes.all)
    for index in range(most_rounds):
        if index >= LEAST_ROUNDS:
            if lanes.anchor not in running:
                break
            running = _still_running(lanes, objective, figures, running)
            if not has_time(len(running)) or not _is_open(lanes, objective, figures, running):
                break
        for choice in order_of_round(running, index):
            try:
                figures[choice].append(measure_leniently(measure, choice))
            except PipelineError:
                running.remove(choice)
                if choice != lanes.anchor:  # the rounds it was in still count
                    del figures[choice]
    return {choice: tuple(of_plan) for choice, of_plan in figures.items() if of_plan}


def measure_leniently(measure: Callable[[Choice], Figures], choice: Choice) -> Figures:
    """Measures a plan; default ONNX Runtime once more if it fails.

    A plan that fails now and then is none to adopt. The default is no candidate and what all others are
    compared with, so what fails once may have been the machine's fault.

    Raises:
        PipelineError: It failed.
    """
    try:
        return measure(choice)
    except PipelineError:
        if choice != DEFAULT:
            raise
    return measure(choice)


def _find_firsts(
    lanes: Lanes, objective: Objective, figures: Finals, running: Sequence[Choice]
) -> dict[Choice, Choice]:
    """Returns the contenders that are still in the race, each with the plan that serves before it."""
    finals = {choice: figures[choice] for choice in running}
    wanted = [choice for choice in running if choice in lanes.contenders]
    allowed = [c for c in wanted if not objective.violations(finals[c], finals[lanes.anchor])]
    return {choice: find_first(finals, choice, objective) for choice in allowed or wanted}


def _costs(
    firsts: Mapping[Choice, Choice], objective: Objective, figures: Finals
) -> dict[Choice, list[float]]:
    return {second: pair_costs(figures, first, second, objective) for second, first in firsts.items()}


def _still_running(
    lanes: Lanes, objective: Objective, figures: Finals, running: Sequence[Choice]
) -> list[Choice]:
    firsts = _find_firsts(lanes, objective, figures, running)
    left = rank(_costs(firsts, objective, figures)).contenders() if firsts else ()
    stay = {lanes.anchor, *left, *(firsts[choice] for choice in left)}
    return [choice for choice in running if choice in stay]


def _is_open(lanes: Lanes, objective: Objective, figures: Finals, running: Sequence[Choice]) -> bool:
    """Says whether it is not clear yet which plan costs least, or whether that beats the anchor."""
    costs = _costs(_find_firsts(lanes, objective, figures, running), objective, figures)
    if not costs:
        return False
    standing = rank(costs)
    if standing.is_close():
        return True
    if standing.leader == lanes.anchor:
        return False
    anchor, own = ([objective.cost_ms(one) for one in figures[c]] for c in (lanes.anchor, standing.leader))
    return not is_below(own, anchor) and not is_below(anchor, own)
