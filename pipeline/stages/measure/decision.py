"""Which plan is shipped, decided from measured figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from pipeline.bundle.manifest import Decision
from pipeline.bundle.summary import Summary
from pipeline.measuring.comparison import paired_ratio, ratio_of_medians, separated, summarise
from pipeline.report.wording import format_ratio
from pipeline.runtime.probe import ProbeResult
from pipeline.tuning.objective import Figures, Objective, describe_memory

DEFAULT = "default"
"""The plan every other one is compared with: the source model in plain ONNX Runtime, `ORT_ENABLE_ALL`."""

FIRST = "first phase"
"""The plan that serves until the prepared one is ready, where the search found one worth it."""

_PREPARED = "prepared"
_PORTABLE = "portable"

STEADY_ALLOWANCE = 1.03
"""How much slower a run may be, relative to the default, before a faster load is not worth it."""

FAR = 1.1
"""Runs this much slower count as slower even where the noise is as large."""

Samples = Mapping[str, Sequence[Figures]]
"""Figures by plan, the k-th of every plan from the same round."""


def decide(samples: Samples, *, candidates: Sequence[str], objective: Objective) -> Decision:
    """Chooses the plan to ship.

    The first candidate is shipped that keeps the limits and is better than the default beyond the noise:
    ready sooner and not slower in steady state (slower means by more than 3 %, and beyond the
    noise or by more than 10 %), or cheaper over all the runs of a session. If there is none, the default is
    shipped: a user then has what plain ONNX Runtime would have given. A default that exceeds a limit is no
    way out: the first candidate that keeps them is shipped instead. The prepared plan is judged together with
    its first phase, if it has one: ready is when that is, and the cost is that of both.

    Args:
        samples: Figures of at least three rounds; plans that failed are absent. Without a `default` nothing
            can be compared, and the first candidate is shipped.
        candidates: Plans that can be shipped, best liked first; at least one is in `samples`.
        objective: Runs of a session before it is gone, and limits.
    """
    remaining = [plan for plan in candidates if plan in samples]
    default = samples.get(DEFAULT)
    if default is None:
        return Decision(remaining[0], faster=False, reason=_without_default(remaining[0], samples))
    firsts = {_PREPARED: samples.get(FIRST)}
    objections = {plan: _objection(samples[plan], default, objective, firsts.get(plan)) for plan in remaining}
    shipped = next((plan for plan, objection in objections.items() if objection is None), DEFAULT)
    refused = [
        f"{plan} {objection} ({_figures(samples[plan])})"
        for plan, objection in objections.items()
        if objection is not None
    ]
    if shipped == DEFAULT and (limits := objective.violations(default, default)):
        keeping = [plan for plan in remaining if not objective.violations(samples[plan], default)]
        shipped = (keeping or remaining)[0]
        refused.append(f"default ONNX Runtime exceeds its limits: {'; '.join(limits)}")
        if not keeping:
            refused.append("no plan keeps the limits")
    reason = _reason(shipped, samples, refused, objective)
    return Decision(shipped, faster=_is_faster(shipped, samples), reason=reason)


def decide_fallback(samples: Samples, *, objective: Objective) -> Decision | None:
    """Chooses the graph that the portable variant ships: its own where that is better, else the source's.

    Sessions of both are optimised in full for the machine that loads them, so that of the source costs what
    plain ONNX Runtime costs, on any machine.

    Args:
        samples: Figures on the CPU as `decide` takes them.
        objective: Runs of a session before it is gone; its limits are the target's.

    Returns:
        None where the portable variant's own graph was not measured.
    """
    portable, default = samples.get(_PORTABLE), samples.get(DEFAULT)
    if portable is None:
        return None
    unlimited = Objective(objective.runs_per_load)
    objection = None if default is None else _objection(portable, default, unlimited)
    if default is None or objection is None:
        return decide(samples, candidates=(_PORTABLE,), objective=unlimited)
    reason = (
        f"the source's graph, optimised at every load as by plain ONNX Runtime ({_figures(default)}): "
        f"portable {objection} ({_figures(portable)})"
    )
    return Decision(DEFAULT, faster=False, reason=reason)


def decide_converted(samples: Samples, *, objective: Objective) -> Decision:
    """Ships the prepared plan of a variant that is there beside another, with what it costs relative to it.

    Args:
        samples: Figures as `decide` takes them; of `prepared`, and of what it is compared with.
        objective: Runs of a session before it is gone.
    """
    prepared = samples[_PREPARED]
    phrases = [
        f"costs {ratio_of_medians(_costs(prepared, objective), _costs(figures, objective)):.2f}× "
        f"{'default ONNX Runtime' if name == DEFAULT else name} ({_figures(figures)})"
        for name, figures in samples.items()
        if name != _PREPARED
    ]
    reason = f"asked for ({_figures(prepared)}); {'; '.join(phrases) or 'nothing else could be measured'}"
    default = samples.get(DEFAULT)
    faster = default is not None and separated(_readies(prepared), _readies(default))
    return Decision(_PREPARED, faster=faster, reason=reason)


def _costs(figures: Sequence[Figures], objective: Objective) -> list[float]:
    return [objective.cost_ms(one) for one in figures]


def _readies(figures: Sequence[Figures]) -> list[float]:
    return [one.ready_ms for one in figures]


def _steadies(figures: Sequence[Figures]) -> list[float]:
    return [one.steady_ms for one in figures]


def _is_faster(shipped: str, samples: Samples) -> bool:
    first = samples.get(FIRST) if shipped == _PREPARED else None
    return shipped != DEFAULT and separated(_readies(first or samples[shipped]), _readies(samples[DEFAULT]))


def _objection(
    candidate: Sequence[Figures],
    default: Sequence[Figures],
    objective: Objective,
    first: Sequence[Figures] | None = None,
) -> str | None:
    if limits := objective.violations(candidate, default):
        return f"exceeds its limits: {'; '.join(limits)}"
    if first is not None and separated(_costs(default, objective), _costs(candidate, objective)):
        return "costs a job more that does not load it in two phases"
    pairs = zip(first or candidate, candidate, strict=False)
    if separated([objective.pair_cost_ms(*pair) for pair in pairs], _costs(default, objective)):
        return None
    if not separated(_readies(first or candidate), _readies(default)):
        return "is not ready sooner beyond the noise"
    steady = _steadies(candidate), _steadies(default)
    ratio = paired_ratio(*steady)
    if ratio > STEADY_ALLOWANCE and (separated(*reversed(steady)) or ratio > FAR):
        return f"takes {ratio:.2f}× the time per run in steady state"
    return None


def _reason(shipped: str, samples: Samples, refused: Sequence[str], objective: Objective) -> str:
    default = samples[DEFAULT]
    if shipped == DEFAULT:
        runs = "1 run" if objective.runs_per_load == 1 else f"{objective.runs_per_load} runs"
        why = "; ".join(refused) or "no other plan could be measured"
        return (
            f"nothing prepared beats plain ONNX Runtime for {runs} per load: "
            f"the bundle ships the source's graph ({_figures(default)}); {why}"
        )
    chosen = samples[shipped]
    first = samples.get(FIRST, chosen) if shipped == _PREPARED else chosen
    sooner = ratio_of_medians(_readies(default), _readies(first))
    steady = ratio_of_medians(_steadies(chosen), _steadies(default))
    with_first = (
        "" if first is chosen else f" with its first phase, ready {_spread(summarise(_readies(first)))} ms,"
    )
    sentence = (
        f"{shipped}{with_first} is ready {format_ratio(sooner)} sooner than default ONNX Runtime, "
        f"at {steady:.2f}× its time per run "
        f"({_figures(chosen)} against {_figures(default)}){describe_memory(chosen, default)}"
    )
    return f"{sentence}; {'; '.join(refused)}" if refused else sentence


def _without_default(shipped: str, samples: Samples) -> str:
    figures = _figures(samples[shipped])
    return f"{shipped} is shipped uncompared ({figures}): default ONNX Runtime could not be measured"


def _figures(figures: Sequence[Figures]) -> str:
    ready, steady = summarise(_readies(figures)), summarise(_steadies(figures))
    return f"ready {_spread(ready)} ms, steady {_spread(steady)} ms"


def _spread(summary: Summary) -> str:
    return f"{summary.median:.4g} [{summary.p25:.4g}–{summary.p75:.4g}]"


def with_common_start(samples: Samples) -> Samples:
    """Returns figures with one start for all: what came before a session is the median of all processes.

    Interpreter and `import onnxruntime` are the same whatever is loaded. On a busy machine they take longer
    in one process than in another by more than a small model's whole session does, which says nothing of it.
    """
    starts = [one.ready_ms - one.init_ms - one.first_ms for figures in samples.values() for one in figures]
    start = median(starts)
    return {
        plan: tuple(replace(one, ready_ms=start + one.init_ms + one.first_ms) for one in figures)
        for plan, figures in samples.items()
    }


def samples_of(results: Sequence[ProbeResult]) -> tuple[Figures, ...]:
    """Returns the figures that decide what is shipped."""
    return tuple(
        Figures(
            ready_ms=result.ready_ms,
            init_ms=result.init_ms,
            first_ms=result.first_ms,
            steady_ms=result.steady_ms,
            private_mb=result.private_mb,
            peak_mb=result.peak_mb,
            gpu_mb=result.gpu_mb,
        )
        for result in results
    )
