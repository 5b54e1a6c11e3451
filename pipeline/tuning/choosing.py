"""Which of the finalists is chosen, which plan may come before it, and why. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.errors import TuningError
from pipeline.measuring.comparison import LEAST_ROUNDS, is_below, paired_ratio
from pipeline.tuning.final import ALIKE, Finals, rank
from pipeline.tuning.objective import Figures, Objective, describe_memory
from pipeline.tuning.search import Found
from pipeline.tuning.space import DEFAULT, RECIPE, Choice, Space, find_twins

AS_SOON = 1.03
"""First results this close, and not apart beyond the noise, come as soon."""

STEADY_ALLOWANCE = 1.02
"""How much longer a run may be where a plan is adopted for its first result alone."""

WORTH_A_PHASE = 0.8
"""A first plan has to give its first result in this part of the steady plan's time."""

Reader = Callable[[Figures], float]


@dataclass(frozen=True)
class Verdict:
    """What a search comes to.

    Attributes:
        choice: The plan to prepare; where nothing beat the default, the base, or, if that fails, exceeds a
            limit or costs more, the cheapest that does not.
        beats_default: Whether it costs less than default ONNX Runtime beyond the noise.
        reason: One sentence with the figures.
        first_phase: A plan over the same files with a sooner first result, None if there is none.
        overlap_mb: Private memory of both sessions, once both are ready, in MB of 2**20 bytes.
    """

    choice: Choice
    beats_default: bool
    reason: str
    first_phase: Choice | None = None
    overlap_mb: float | None = None


def choose(space: Space, objective: Objective, found: Found) -> Verdict:
    """Chooses among the plans that were compared afresh.

    A plan is adopted only if it beats the anchor beyond the noise: it costs less, or its first result comes
    sooner and it does not cost more. Of the plans that cost as little as the cheapest, one with the soonest
    first result is taken, and of several such the one that changes least.

    Args:
        space: What could be chosen.
        objective: What a plan costs and must not exceed.
        found: The search.

    Raises:
        TuningError: No plan but the default runs, or none keeps the limits.
    """
    finals = {choice: figures for choice, figures in found.finals.items() if len(figures) >= LEAST_ROUNDS}
    anchor = finals.get(found.anchor, ())
    own = {choice: figures for choice, figures in finals.items() if choice != DEFAULT}
    allowed = {c: f for c, f in own.items() if not objective.violations(f, anchor or f)}
    # Who left was behind, and has few rounds to be lucky in.
    stayed = _stayed(allowed)
    adopted = {
        c: f for c, f in stayed.items() if c == found.anchor or (anchor and beats(f, anchor, objective))
    }
    if not adopted:
        choice = _unadopted(space, objective, found, own, allowed)
        return Verdict(choice, beats_default=False, reason=_nothing_better(space, objective, found, own))
    cheapest = _find_cheapest(adopted, objective)
    level = {c: f for c, f in adopted.items() if _is_level(f, adopted[cheapest], objective)}
    best = _plainest(space, _soonest(level), objective)
    first, overlap_mb = _first_phase(space, objective, own, best)
    return Verdict(
        choice=best,
        beats_default=found.anchor == DEFAULT,
        reason=f"{space.describe(best)}: {_figures(adopted[best], anchor, objective, _name(found.anchor))}",
        first_phase=first,
        overlap_mb=overlap_mb,
    )


def beats(figures: Sequence[Figures], anchor: Sequence[Figures], objective: Objective) -> bool:
    """Says whether a plan is better than the anchor beyond the noise.

    A doubt counts against the plan: of what has to be no more, the estimate has to be no more, however wide
    the spread.

    Args:
        figures: Of the plan, three rounds at least.
        anchor: Of the anchor; further rounds are passed over.
        objective: What a plan costs.
    """
    if _is_below(figures, anchor, objective.cost_ms):
        return True
    longer = _ratio(figures, anchor, _steady_ms) > STEADY_ALLOWANCE
    dearer = _ratio(figures, anchor, objective.cost_ms) > ALIKE
    return _is_below(figures, anchor, _ready_ms) and not longer and not dearer


def _ready_ms(figures: Figures) -> float:
    return figures.ready_ms


def _steady_ms(figures: Figures) -> float:
    return figures.steady_ms


def _values(
    figures: Sequence[Figures], others: Sequence[Figures], read: Reader
) -> tuple[list[float], list[float]]:
    """Returns a figure of two plans, of the rounds that both were in."""
    rounds = min(len(figures), len(others))
    return [read(one) for one in figures[:rounds]], [read(one) for one in others[:rounds]]


def _ratio(figures: Sequence[Figures], others: Sequence[Figures], read: Reader) -> float:
    return paired_ratio(*_values(figures, others, read))


def _is_below(figures: Sequence[Figures], others: Sequence[Figures], read: Reader) -> bool:
    return is_below(*_values(figures, others, read))


def _find_cheapest(plans: Finals, objective: Objective) -> Choice:
    """Returns the plan that costs least of those that stayed to the end."""
    costs = {c: [objective.cost_ms(one) for one in f] for c, f in _stayed(plans).items()}
    return rank(costs).leader


def _stayed(plans: Finals) -> Finals:
    """Returns the plans that were in the comparison longest."""
    most = max((len(figures) for figures in plans.values()), default=0)
    return {choice: figures for choice, figures in plans.items() if len(figures) == most}


def _unadopted(space: Space, objective: Objective, found: Found, own: Finals, allowed: Finals) -> Choice:
    """Returns what is prepared where nothing beat the default."""
    if allowed:
        cheapest = _find_cheapest(allowed, objective)
        base = allowed.get(space.base)
        return space.base if base and _is_level(base, allowed[cheapest], objective) else cheapest
    trials = {trial.choice: trial for trial in found.trials if trial.choice not in (DEFAULT, RECIPE)}
    working = [
        choice for choice, trial in trials.items() if choice not in own and objective.keeps_limits(trial)
    ]
    if own and not working:
        raise _beyond_limits(space, objective, own, found.finals.get(found.anchor, ()))
    if not working:
        failures = [f"  {space.describe(c)}: {t.failure}" for c, t in trials.items() if t.failure is not None]
        raise TuningError("\n".join(["no plan runs but default ONNX Runtime", *failures[:5]]))
    best = min(working, key=lambda choice: objective.score(trials[choice]))
    return space.base if space.base in working else best


def _beyond_limits(space: Space, objective: Objective, own: Finals, anchor: Sequence[Figures]) -> TuningError:
    lines = [
        f"  {space.describe(choice)}: {'; '.join(objective.violations(figures, anchor or figures))}"
        for choice, figures in own.items()
    ]
    return TuningError(
        "\n".join(["no plan keeps the limits", *lines]), hint="raise or remove the tune.max_… of its spec"
    )


def _is_level(figures: Sequence[Figures], cheapest: Sequence[Figures], objective: Objective) -> bool:
    dearer = _is_below(cheapest, figures, objective.cost_ms)
    return not dearer and _ratio(figures, cheapest, objective.cost_ms) <= ALIKE


def _soonest(level: Finals) -> Finals:
    soonest = min(level, key=lambda choice: median([one.ready_ms for one in level[choice]]))
    return {
        choice: figures
        for choice, figures in level.items()
        if choice == soonest
        or (
            not _is_below(level[soonest], figures, _ready_ms)
            and _ratio(figures, level[soonest], _ready_ms) <= AS_SOON
        )
    }


def _plainest(space: Space, level: Finals, objective: Objective) -> Choice:
    base = set(space.base.values)

    def cost_ms(choice: Choice) -> float:
        return median([objective.cost_ms(one) for one in level[choice]])

    return min(level, key=lambda choice: (len(set(choice.values) - base), cost_ms(choice)))


def _first_phase(
    space: Space, objective: Objective, finals: Finals, best: Choice
) -> tuple[Choice | None, float | None]:
    """Returns the twin of the chosen plan with the soonest first result, and both sessions' memory.

    How long the twin's runs are is no matter: it serves for a moment.
    """
    twins = [twin for twin in find_twins(space, best) if twin in finals]
    if not twins:
        return None, None
    twin = min(twins, key=lambda choice: _ratio(finals[choice], finals[best], _ready_ms))
    sooner = _is_below(finals[twin], finals[best], _ready_ms)
    if not sooner or _ratio(finals[twin], finals[best], _ready_ms) > WORTH_A_PHASE:
        return None, None
    # Interpreter and libraries are counted twice: the true figure is below.
    overlap_mb = sum(median([one.private_mb for one in finals[choice]]) for choice in (best, twin))
    gpu_mb = sum(median([one.gpu_mb or 0.0 for one in finals[choice]]) for choice in (best, twin))
    limits = ((overlap_mb, objective.max_private_mb), (gpu_mb, objective.max_gpu_mb))
    if any(limit is not None and value > limit for value, limit in limits):
        return None, None
    return twin, overlap_mb


def _name(anchor: Choice) -> str:
    return "the default" if anchor == DEFAULT else "the base plan"


def _figures(figures: Sequence[Figures], anchor: Sequence[Figures], objective: Objective, name: str) -> str:
    ratios = {
        "cost": _ratio(figures, anchor, objective.cost_ms),
        "ready": _ratio(figures, anchor, _ready_ms),
        "steady run": _ratio(figures, anchor, _steady_ms),
    }
    told = ", ".join(f"{name} {ratio:.3g}×" for name, ratio in ratios.items())
    runs = objective.runs_per_load
    memory = describe_memory(figures, anchor)
    return f"{told} of {name}'s at {runs} {'run' if runs == 1 else 'runs'} per load{memory}"


def _nothing_better(space: Space, objective: Objective, found: Found, own: Finals) -> str:
    anchor, name = found.finals.get(found.anchor, ()), _name(found.anchor)
    if len(anchor) < LEAST_ROUNDS:
        return f"nothing beat {name}: it failed in the last comparison"
    if not own:
        return f"nothing beat {name}: no other plan could be compared with it"
    best = _find_cheapest(own, objective)
    limits = objective.violations(own[best], anchor)
    why = f", beyond its limits ({'; '.join(limits)})" if limits else ""
    told = _figures(own[best], anchor, objective, name)
    return f"nothing beat {name} beyond the noise: the best, {space.describe(best)}, has {told}{why}"
