"""Choice of a finalist, its first-phase plan, and the reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ortprep.children.probe import ProbeResult
from ortprep.errors import StageError
from ortprep.measuring.comparison import MIN_ROUNDS, is_below, paired_ratio
from ortprep.tuning.final import SAME_COST_RATIO, find_first, find_soonest, overlap_mb, pair_costs, rank
from ortprep.tuning.objective import Finals, Objective, describe_memory, ratio, ready_ms, steady_ms
from ortprep.tuning.search import PlanSearchResult
from ortprep.tuning.space import DEFAULT, PlanChoice, Space


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
    finals = {choice: figures for choice, figures in found.finals.items() if len(figures) >= MIN_ROUNDS}
    baseline = finals.get(found.baseline, ())
    compared = {choice: figures for choice, figures in finals.items() if choice != DEFAULT}
    allowed = {c: f for c, f in compared.items() if not objective.violations(f, baseline or f)}
    if not allowed:
        best = _find_untested(space, objective, found, compared)
        reason = f"{space.describe(best)}: nothing within the limits could be compared"
        return PlanSelection(best, reason)
    # A plan that left was behind, and has few rounds to be lucky in.
    stayed = _find_stayed(allowed)
    firsts = {choice: find_first(stayed, choice, objective) for choice in stayed}
    costs = {choice: pair_costs(stayed, first, choice, objective) for choice, first in firsts.items()}
    cheapest = costs[rank(costs).leader]
    level = [choice for choice, own in costs.items() if _is_level(own, cheapest)]
    base = set(space.base.values)
    best = min(
        find_soonest(stayed, level),
        key=lambda choice: (len(set(choice.values) - base), median(costs[choice])),
    )
    reason = f"{space.describe(best)}: {_describe(stayed[best], baseline, objective, found.baseline)}"
    # Both sessions together have limits of their own, so a first phase may exceed those of a plan.
    runners = _find_stayed(compared)
    first = find_first(runners, best, objective) if best in runners else best
    if first == best:
        return PlanSelection(best, reason)
    sooner = ratio(runners[best], runners[first], ready_ms)
    reason = f"{reason}; {space.describe(first)} serves first, ready {sooner:.3g}× sooner"
    return PlanSelection(best, reason, first, overlap_mb(runners, first, best))


def _find_stayed(plans: Finals) -> Finals:
    """Returns the plans that were in the comparison longest."""
    rounds = max((len(figures) for figures in plans.values()), default=0)
    return {choice: figures for choice, figures in plans.items() if len(figures) == rounds}


def _is_level(costs: Sequence[float], cheapest: Sequence[float]) -> bool:
    return not is_below(cheapest, costs) and paired_ratio(costs, cheapest) <= SAME_COST_RATIO


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
    baseline = found.finals.get(found.baseline, ())
    lines = [
        f"  {space.describe(choice)}: {'; '.join(objective.violations(figures, baseline or figures))}"
        for choice, figures in compared.items()
    ]
    raise StageError(
        "\n".join(["no plan stays within the limits", *lines]),
        hint="raise or remove the tune.max_… limit in its spec",
    )


def _describe(
    figures: Sequence[ProbeResult], baseline: Sequence[ProbeResult], objective: Objective, name: PlanChoice
) -> str:
    """Returns a plan's cost and figures relative to the baseline's."""
    known = "default" if name == DEFAULT else "base plan"
    if not baseline:
        return f"costs least; the {known} failed in the last comparison"
    better = {"cost": objective.cost_ms, "first result": ready_ms, "later runs": steady_ms}
    words = ", ".join(f"{what} {ratio(baseline, figures, read):.3g}×" for what, read in better.items())
    runs = objective.runs_per_load
    memory = describe_memory(figures, baseline)
    return f"{words} better than the {known}'s at {runs} {'run' if runs == 1 else 'runs'} per load{memory}"
