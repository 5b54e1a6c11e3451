"""Which finalist is chosen, its first-phase plan, and the reason. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ortprep.children.probe import ProbeResult
from ortprep.errors import TuningError
from ortprep.measuring.comparison import MIN_ROUNDS, is_below, paired_ratio
from ortprep.tuning.final import rank
from ortprep.tuning.objective import Finals, Objective, describe_memory
from ortprep.tuning.phases import (
    SAME_COST_RATIO,
    find_first,
    find_soonest,
    is_less,
    overlap_mb,
    pair_costs,
    ratio,
    ready_ms,
    steady_ms,
)
from ortprep.tuning.search import PlanSearchResult
from ortprep.tuning.space import DEFAULT, PlanChoice, Space

STEADY_ALLOWANCE = 1.02
"""Maximum ratio of run times if a plan is adopted for its first result alone."""

Costs = Mapping[PlanChoice, Sequence[float]]
"""What plans cost in ms, round by round."""


@dataclass(frozen=True)
class PlanSelection:
    """Result of a search.

    Attributes:
        choice: The plan to prepare. If nothing beat the default, the base; if the base fails, exceeds a limit
            or costs more, the cheapest plan that does not.
        beats_default: Whether it costs less than default ONNX Runtime beyond the noise.
        first_phase: The plan that serves until the choice is ready, None if none is worth it.
        overlap_mb: Private memory of both sessions, in MB of 2**20 bytes.
    """

    choice: PlanChoice
    beats_default: bool
    reason: str
    first_phase: PlanChoice | None = None
    overlap_mb: float | None = None


def choose(space: Space, objective: Objective, found: PlanSearchResult) -> PlanSelection:
    """Chooses among the plans of the last comparison.

    A plan is adopted only if it beats the anchor beyond the noise: it costs less, or its first result comes
    sooner and it does not cost more. A plan's cost includes its first-phase plan. Of the plans that cost as
    little as the cheapest, the one that is ready soonest is taken, then the one with the fewest changes.

    Raises:
        TuningError: No plan but the default runs, or none keeps the limits.
    """
    finals = {choice: figures for choice, figures in found.finals.items() if len(figures) >= MIN_ROUNDS}
    anchor = finals.get(found.anchor, ())
    own = {choice: figures for choice, figures in finals.items() if choice != DEFAULT}
    allowed = {c: f for c, f in own.items() if not objective.violations(f, anchor or f)}
    # Who left was behind, and has few rounds to be lucky in.
    stayed = _stayed(allowed)
    costs = _find_costs(stayed, objective)
    adopted = {
        choice: costs[choice]
        for choice, figures in stayed.items()
        if choice == found.anchor or (anchor and beats(figures, anchor, objective))
    }
    if adopted:
        cheapest = rank(adopted).leader
        level = [choice for choice in adopted if _is_level(adopted[choice], adopted[cheapest])]
        best = _plainest(space, find_soonest(finals, level), adopted)
        words = _figures(finals[best], anchor, objective, _name(found.anchor))
        reason = f"{space.describe(best)}: {words}"
    else:
        best = _unadopted(space, objective, found, own, costs)
        reason = _nothing_better(space, objective, found, own)
    verdict = PlanSelection(best, beats_default=bool(adopted) and found.anchor == DEFAULT, reason=reason)
    return _with_first(verdict, space, objective, _stayed(own))


def _with_first(verdict: PlanSelection, space: Space, objective: Objective, own: Finals) -> PlanSelection:
    """Returns the selection with its first-phase plan, if one is worth it."""
    second = verdict.choice
    first = find_first(own, second, objective) if second in own else second
    if first == second:
        return verdict
    sooner = ratio(own[first], own[second], ready_ms)
    return replace(
        verdict,
        reason=f"{verdict.reason}; {space.describe(first)} serves first, ready in {sooner:.3g}× its time",
        first_phase=first,
        overlap_mb=overlap_mb(own, first, second),
    )


def beats(figures: Sequence[ProbeResult], anchor: Sequence[ProbeResult], objective: Objective) -> bool:
    """Says whether a plan with three rounds or more is better than the anchor beyond the noise.

    A doubt counts against the plan: an estimate that must not be larger must not be larger, however wide the
    spread.
    """
    if is_less(figures, anchor, objective.cost_ms):
        return True
    longer = ratio(figures, anchor, steady_ms) > STEADY_ALLOWANCE
    dearer = ratio(figures, anchor, objective.cost_ms) > SAME_COST_RATIO
    return is_less(figures, anchor, ready_ms) and not longer and not dearer


def _find_costs(plans: Finals, objective: Objective) -> Costs:
    """Returns the costs of the plans that stayed to the end, first-phase plans included."""
    stayed = _stayed(plans)
    return {c: pair_costs(stayed, find_first(stayed, c, objective), c, objective) for c in stayed}


def _stayed(plans: Finals) -> Finals:
    """Returns the plans that were in the comparison longest."""
    most = max((len(figures) for figures in plans.values()), default=0)
    return {choice: figures for choice, figures in plans.items() if len(figures) == most}


def _unadopted(
    space: Space, objective: Objective, found: PlanSearchResult, own: Finals, costs: Costs
) -> PlanChoice:
    """Returns the plan to prepare if nothing beat the default."""
    if costs:
        cheapest = rank(costs).leader
        is_level = space.base in costs and _is_level(costs[space.base], costs[cheapest])
        return space.base if is_level else cheapest
    trials = {trial.choice: trial for trial in found.trials if trial.choice != DEFAULT}
    working = [
        choice for choice, trial in trials.items() if choice not in own and objective.keeps_limits(trial)
    ]
    if own and not working:
        raise _beyond_limits(space, objective, own, found.finals.get(found.anchor, ()))
    if not working:
        failures = [f"  {space.describe(c)}: {t.failure}" for c, t in trials.items() if t.failure is not None]
        raise TuningError("\n".join(["no plan except default ONNX Runtime runs", *failures[:5]]))
    best = min(working, key=lambda choice: objective.score(trials[choice]))
    return space.base if space.base in working else best


def _beyond_limits(
    space: Space, objective: Objective, own: Finals, anchor: Sequence[ProbeResult]
) -> TuningError:
    lines = [
        f"  {space.describe(choice)}: {'; '.join(objective.violations(figures, anchor or figures))}"
        for choice, figures in own.items()
    ]
    return TuningError(
        "\n".join(["no plan stays within the limits", *lines]),
        hint="raise or remove the tune.max_… limit in its spec",
    )


def _is_level(costs: Sequence[float], cheapest: Sequence[float]) -> bool:
    return not is_below(cheapest, costs) and paired_ratio(costs, cheapest) <= SAME_COST_RATIO


def _plainest(space: Space, level: Iterable[PlanChoice], costs: Costs) -> PlanChoice:
    base = set(space.base.values)
    return min(level, key=lambda choice: (len(set(choice.values) - base), median(costs[choice])))


def _name(anchor: PlanChoice) -> str:
    return "the default" if anchor == DEFAULT else "the base plan"


def _figures(
    figures: Sequence[ProbeResult], anchor: Sequence[ProbeResult], objective: Objective, name: str
) -> str:
    ratios = {
        "cost": ratio(figures, anchor, objective.cost_ms),
        "ready": ratio(figures, anchor, ready_ms),
        "steady run": ratio(figures, anchor, steady_ms),
    }
    words = ", ".join(f"{name} {ratio:.3g}×" for name, ratio in ratios.items())
    runs = objective.runs_per_load
    memory = describe_memory(figures, anchor)
    return f"{words} of {name}'s at {runs} {'run' if runs == 1 else 'runs'} per load{memory}"


def _nothing_better(space: Space, objective: Objective, found: PlanSearchResult, own: Finals) -> str:
    anchor, name = found.finals.get(found.anchor, ()), _name(found.anchor)
    if len(anchor) < MIN_ROUNDS:
        return f"nothing beat {name}: it failed in the last comparison"
    if not own:
        return f"nothing beat {name}: no other plan could be compared with it"
    best = rank(_find_costs(own, objective)).leader
    limits = objective.violations(own[best], anchor)
    why = f", beyond its limits ({'; '.join(limits)})" if limits else ""
    words = _figures(own[best], anchor, objective, name)
    return f"nothing beat {name} beyond the noise: the best, {space.describe(best)}, has {words}{why}"
