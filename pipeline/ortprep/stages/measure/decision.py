"""Choice of the plan to ship, from measured figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from ortprep.bundle.figures import Samples
from ortprep.bundle.manifest import Decision
from ortprep.children.probe import ProbeResult
from ortprep.measuring.comparison import is_below, paired_ratio, ratio_interval
from ortprep.measuring.shipped import DEFAULT, FIRST, PORTABLE, PREPARED
from ortprep.tables import format_ratio
from ortprep.tuning.objective import (
    Objective,
    Reader,
    is_less,
    ratio,
    ready_ms,
    steady_ms,
)

STEADY_ALLOWANCE = 1.03
"""How much slower a run may be, relative to the default, before a faster load is not worth it."""

MIN_GAIN = 0.01
"""A plan that gains less costs the same, however sure the gain."""

PlanRounds = Mapping[str, Sequence[ProbeResult]]
"""Figures by plan, the k-th of every plan from the same round."""


def decide(samples: PlanRounds, *, candidates: Sequence[str], objective: Objective) -> Decision:
    """Chooses the plan to ship.

    The first candidate is shipped that keeps the limits and is better than the default beyond the noise:
    cheaper over all runs of a session, or ready sooner and not slower in steady state. Slower means by more
    than 3 %, one standard error allowed: a graph that was optimised beforehand runs the same kernels, so it
    has to be shown to be slower. Where single figures scatter by 15 %, as on a shared machine, 4 % of equal
    plans are refused after ten rounds, 50 % of those that take 1.1 times as long and 95 % of 1.3 times (two
    models, 50 rounds of each, drawn 600 times). Otherwise the default is shipped, unless it exceeds a
    limit: then the first candidate that keeps them. The prepared plan is judged together with its first
    phase, if it has one.

    Args:
        samples: Figures of at least three rounds; plans that failed are absent. Without a `default` the first
            candidate is shipped.
        candidates: Plans that can be shipped, best first; at least one is in `samples`.
        objective: Runs of a session, and limits.
    """
    remaining = [plan for plan in candidates if plan in samples]
    default = samples.get(DEFAULT)
    if default is None:
        shipped, why = remaining[0], "default ONNX Runtime could not be measured"
        reason = f"{shipped} is shipped without a comparison ({_figures(samples[shipped])}): {why}"
        return Decision(shipped, reason)
    firsts = {PREPARED: samples.get(FIRST)}
    objections = {plan: _objection(samples[plan], default, objective, firsts.get(plan)) for plan in remaining}
    shipped = next((plan for plan, objection in objections.items() if objection is None), DEFAULT)
    refused = [
        f"{plan} {objection} ({_figures(samples[plan])})"
        for plan, objection in objections.items()
        if objection is not None
    ]
    if shipped == DEFAULT and (limits := objective.violations(default)):
        keeping = [plan for plan in remaining if not objective.violations(samples[plan])]
        shipped = (keeping or remaining)[0]
        refused.append(f"default ONNX Runtime exceeds its limits: {'; '.join(limits)}")
        if not keeping:
            refused.append("no plan stays within the limits")
    return Decision(shipped, _reason(shipped, samples, refused, objective))


def decide_fallback(samples: PlanRounds, *, objective: Objective) -> Decision | None:
    """Chooses the graph of the portable variant: its own where that is better, else the source's.

    Every load optimises either in full, so that the source costs what plain ONNX Runtime costs, on any
    machine.

    Returns:
        None where the portable variant's own graph was not measured.
    """
    if PORTABLE not in samples:
        return None
    unlimited = Objective(runs_per_load=objective.runs_per_load)
    return decide(samples, candidates=(PORTABLE,), objective=unlimited)


def decide_converted(samples: PlanRounds, *, objective: Objective) -> Decision:
    """Ships the prepared plan of a variant that stands beside another, with its relative costs."""
    prepared = samples[PREPARED]
    phrases = [
        f"cost {format_ratio(ratio(figures, prepared, objective.cost_ms))} better than "
        f"{'default ONNX Runtime' if name == DEFAULT else name}'s ({_figures(figures)})"
        for name, figures in samples.items()
        if name != PREPARED
    ]
    reason = f"asked for ({_figures(prepared)}); {'; '.join(phrases) or 'nothing else could be measured'}"
    return Decision(PREPARED, reason)


def _objection(
    candidate: Sequence[ProbeResult],
    default: Sequence[ProbeResult],
    objective: Objective,
    first: Sequence[ProbeResult] | None = None,
) -> str | None:
    """Returns why a plan is not better than the default, None if it is."""
    if limits := objective.violations(candidate):
        return f"exceeds its limits: {'; '.join(limits)}"
    if first is not None and is_less(default, candidate, objective.cost_ms, min_gain=MIN_GAIN):
        return "costs more for a job that does not load it in two phases"
    costs = [objective.pair_cost_ms(*pair) for pair in zip(first or candidate, candidate, strict=True)]
    if is_below(costs, [objective.cost_ms(run) for run in default], min_gain=MIN_GAIN):
        return None
    if not is_less(first or candidate, default, ready_ms, min_gain=MIN_GAIN):
        return "is not ready sooner beyond the noise"
    steady = [run.steady_ms for run in candidate], [run.steady_ms for run in default]
    if ratio_interval(*steady, errors=1)[0] > STEADY_ALLOWANCE:
        return f"takes {paired_ratio(*steady):.2f}× the time per run in steady state"
    return None


def _reason(shipped: str, samples: PlanRounds, refused: Sequence[str], objective: Objective) -> str:
    """Returns the sentence with which a bundle explains what ships."""
    default = samples[DEFAULT]
    if shipped == DEFAULT:
        runs = "1 run" if objective.runs_per_load == 1 else f"{objective.runs_per_load} runs"
        why = "; ".join(refused) or "no other plan could be measured"
        return (
            f"nothing prepared beats plain ONNX Runtime for {runs} per load: "
            f"the bundle ships the source's graph ({_figures(default)}); {why}"
        )
    chosen = samples[shipped]
    first = samples.get(FIRST, chosen) if shipped == PREPARED else chosen
    sooner, faster = ratio(default, first, ready_ms), ratio(default, chosen, steady_ms)
    with_first = "" if first is chosen else f" by its first phase, ready {_spread(first, ready_ms)} ms"
    sentence = (
        f"first result {format_ratio(sooner)} sooner than default ONNX Runtime{with_first}, "
        f"later runs {faster:.2f}× as fast"
    )
    return f"{sentence}; {'; '.join(refused)}" if refused else sentence


def _figures(figures: Sequence[ProbeResult]) -> str:
    return f"ready {_spread(figures, ready_ms)} ms, steady {_spread(figures, steady_ms)} ms"


def _spread(figures: Sequence[ProbeResult], read: Reader) -> str:
    summary = Samples.of(map(read, figures))
    return f"{summary.median:.4g} [{summary.p25:.4g}–{summary.p75:.4g}]"


def with_common_start(samples: PlanRounds) -> dict[str, tuple[ProbeResult, ...]]:
    """Returns figures with one start for all, the median of what came before the session in each process."""
    start_ms = median([run.start_ms for figures in samples.values() for run in figures])
    return {plan: tuple(run.with_start(start_ms) for run in figures) for plan, figures in samples.items()}
