"""The choice among the plans of the last comparison. Pure.

A plan is chosen, and its first phase: a plan that serves until the chosen one is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from ortprep.children.probe import ProbeResult
from ortprep.errors import PipelineError, StageError
from ortprep.measuring.comparison import is_below, paired_ratio
from ortprep.tuning.objective import (
    Finals,
    Objective,
    PlanSearchResult,
    Reader,
    Trial,
    is_less,
    ratio,
    ready_ms,
    steady_ms,
)
from ortprep.tuning.space import DEFAULT, PlanChoice, Space, shares_files


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


SAME_READY_RATIO = 1.03
"""Plans that are ready within this factor, and not apart beyond the noise, count as equally fast."""

SAME_COST_RATIO = 1.01
"""Plans whose costs are this close cost the same."""

MAX_FIRST_PHASE_RATIO = 1 / 1.5
"""A first-phase plan is ready within this part of the second plan's time: two sessions have to pay."""


def find_first(finals: Finals, second: PlanChoice, objective: Objective) -> PlanChoice:
    """Returns the plan that serves until `second` is ready: `second` itself if no other is worth it.

    It is loaded from the same files and ready sooner beyond the noise, both sessions together keep the memory
    limit, and both cost a job no more than either alone.
    """
    others = [choice for choice in finals if _may_serve_before(finals, choice, second, objective)]
    for first in find_soonest(finals, others)[:1]:
        pays = ratio(finals[first], finals[second], ready_ms) <= MAX_FIRST_PHASE_RATIO
        if pays and is_less(finals[first], finals[second], ready_ms):
            return first
    return second


def _may_serve_before(finals: Finals, first: PlanChoice, second: PlanChoice, objective: Objective) -> bool:
    """Says whether a plan can be a first phase of another, and the two together cost no more than either."""
    if not objective.first_phase or first in (second, DEFAULT) or not shares_files(first, second):
        return False
    limit = objective.max_private_mb
    if limit is not None and overlap_mb(finals, first, second) > limit:
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
    sooner = Objective.of(objective, runs_per_load=1)
    own = (trial for trial in trials if trial.choice != DEFAULT and sooner.keeps_limits(trial))
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
    """Returns the costs of two plans together, round by round; for one plan alone, pass it twice."""
    pairs = zip(finals[first], finals[second], strict=True)
    return [objective.pair_cost_ms(one, other) for one, other in pairs]


def overlap_mb(finals: Finals, first: PlanChoice, second: PlanChoice) -> float:
    """Returns the private memory of both sessions; interpreter and libraries count twice."""
    return sum(_median(finals[choice], attrgetter("private_mb")) for choice in (first, second))


def _median(figures: Sequence[ProbeResult], read: Reader) -> float:
    return median([read(one) for one in figures])


@dataclass(frozen=True)
class PlanSelection:
    """Result of a search.

    Attributes:
        choice: The plan to prepare.
        reason: One sentence with its figures.
        first_phase: The plan that serves until the choice is ready, None if none is worth it.
        overlap_mb: Private memory of both sessions, in MB of 2**20 bytes.
    """

    choice: PlanChoice
    reason: str
    first_phase: PlanChoice | None = None
    overlap_mb: float | None = None


def choose(space: Space, objective: Objective, found: PlanSearchResult) -> PlanSelection:
    """Chooses among the plans of the last comparison; whether the choice ships is for `measure` to decide.

    A plan's cost includes its first-phase plan. Of the plans that keep the limits and cost as little as the
    cheapest, the one that is ready soonest is taken, then the one with the fewest changes.

    Raises:
        StageError: No plan but the default runs, or none keeps the limits.
    """
    baseline = found.finals.get(found.baseline, ())
    compared = {choice: figures for choice, figures in found.finals.items() if choice != DEFAULT}
    allowed = {c: f for c, f in compared.items() if not objective.violations(f)}
    if not allowed:
        best = _find_untested(space, objective, found, compared)
        reason = f"{space.describe(best)}: nothing within the limits could be compared"
        return PlanSelection(best, reason)
    firsts = {choice: find_first(allowed, choice, objective) for choice in allowed}
    costs = {choice: pair_costs(allowed, first, choice, objective) for choice, first in firsts.items()}
    some = next(iter(costs.values()))
    cheapest = min(costs.values(), key=lambda own: paired_ratio(own, some))
    level = [
        choice
        for choice, own in costs.items()
        if not is_below(cheapest, own) and paired_ratio(own, cheapest) <= SAME_COST_RATIO
    ]
    base = set(space.base.values)
    best = min(
        find_soonest(allowed, level),
        key=lambda choice: (len(set(choice.values) - base), median(costs[choice])),
    )
    reason = f"{space.describe(best)}: {_describe(allowed[best], baseline, objective, found.baseline)}"
    # Both sessions together have limits of their own, so a first phase may exceed those of a plan.
    first = find_first(compared, best, objective)
    if first == best:
        return PlanSelection(best, reason)
    sooner = ratio(compared[best], compared[first], ready_ms)
    reason = f"{reason}; {space.describe(first)} serves first, ready {sooner:.3g}× sooner"
    return PlanSelection(best, reason, first, overlap_mb(compared, first, best))


def _find_untested(
    space: Space, objective: Objective, found: PlanSearchResult, compared: Finals
) -> PlanChoice:
    """Returns the base, or the best plan that only the search measured, where the comparison left none."""
    trials = {trial.choice: trial for trial in found.trials if trial.choice != DEFAULT}
    working = [c for c, trial in trials.items() if c not in compared and objective.keeps_limits(trial)]
    if working:
        best = min(working, key=lambda choice: objective.score(trials[choice]))
        return space.base if space.base in working else best
    if not compared:
        failures = [f"  {space.describe(c)}: {t.failure}" for c, t in trials.items() if t.failure is not None]
        raise StageError("\n".join(["no plan except default ONNX Runtime runs", *failures[:5]]))
    lines = [
        f"  {space.describe(choice)}: {'; '.join(objective.violations(figures))}"
        for choice, figures in compared.items()
    ]
    raise StageError(
        "\n".join(["no plan stays within the limits", *lines]),
        hint="raise or remove tune.max_private_mb in its spec",
    )


def _describe(
    figures: Sequence[ProbeResult], baseline: Sequence[ProbeResult], objective: Objective, name: PlanChoice
) -> str:
    """Returns a plan's cost and figures relative to the baseline's."""
    known = "default" if name == DEFAULT else "base plan"
    if not baseline:
        return f"costs least; the {known} failed in the last comparison"
    better = {"cost": objective.cost_ms, "first result": ready_ms, "later runs": steady_ms}
    words = ", ".join(f"{what} {ratio(baseline, figures, read):.3g}" for what, read in better.items())
    runs = objective.runs_per_load
    loads = f"{runs} {'run' if runs == 1 else 'runs'} per load"
    return f"times better than the {known} at {loads} (below 1 is worse): {words}"
