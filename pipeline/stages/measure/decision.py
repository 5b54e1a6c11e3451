"""Which plan is shipped, decided from measured figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.bundle.manifest import Decision
from pipeline.bundle.summary import Summary
from pipeline.tuning.comparison import ratio_of_medians, separated, summarise

DEFAULT = "default"
"""The plan every other one is compared with: the source model in plain ONNX Runtime, `ORT_ENABLE_ALL`."""

STEADY_ALLOWANCE = 1.03
"""How much slower a run may be, relative to the default, before a faster load is not worth it."""


@dataclass(frozen=True)
class PlanSamples:
    """One plan's figures, the k-th of every plan from the same round.

    Attributes:
        first_result_ms: Making the session and its first run together.
        steady_ms: Median later run of the same process.
    """

    first_result_ms: tuple[float, ...]
    steady_ms: tuple[float, ...]

    def costs_ms(self, runs_per_load: int) -> tuple[float, ...]:
        """Returns what a session costs from its load to its last run, round by round."""
        pairs = zip(self.first_result_ms, self.steady_ms, strict=True)
        return tuple(first + (runs_per_load - 1) * steady for first, steady in pairs)


def decide(
    samples: Mapping[str, PlanSamples], *, candidates: Sequence[str], runs_per_load: int = 1000
) -> Decision:
    """Chooses the plan to ship.

    The first candidate is shipped that is better than the default beyond the noise: faster to its first
    result and not slower in steady state (slower means beyond the noise and by more than 3 %), or cheaper
    over all the runs of a session. If there is none, the default is shipped: a user then has what plain ONNX
    Runtime would have given.

    Args:
        samples: Figures by plan, of at least three rounds; plans that failed are absent. Without a `default`
            nothing can be compared, and the first candidate is shipped.
        candidates: Plans that can be shipped, best liked first; at least one is in `samples`.
        runs_per_load: Runs of a session before it is gone.
    """
    remaining = [plan for plan in candidates if plan in samples]
    default = samples.get(DEFAULT)
    if default is None:
        return Decision(remaining[0], faster=False, reason=_without_default(remaining[0], samples))
    objections = {plan: _objection(samples[plan], default, runs_per_load) for plan in remaining}
    shipped = next((plan for plan, objection in objections.items() if objection is None), DEFAULT)
    refused = [
        f"{plan} {objection} ({_figures(samples[plan])})"
        for plan, objection in objections.items()
        if objection is not None
    ]
    return Decision(shipped, faster=_is_faster(shipped, samples), reason=_reason(shipped, samples, refused))


def _is_faster(shipped: str, samples: Mapping[str, PlanSamples]) -> bool:
    times = samples[shipped].first_result_ms, samples[DEFAULT].first_result_ms
    return shipped != DEFAULT and separated(*times)


def _objection(candidate: PlanSamples, default: PlanSamples, runs_per_load: int) -> str | None:
    if separated(candidate.costs_ms(runs_per_load), default.costs_ms(runs_per_load)):
        return None
    if not separated(candidate.first_result_ms, default.first_result_ms):
        return "is not faster to its first result beyond the noise"
    slower = separated(default.steady_ms, candidate.steady_ms)
    ratio = ratio_of_medians(candidate.steady_ms, default.steady_ms)
    if slower and ratio > STEADY_ALLOWANCE:
        return f"takes {ratio:.2f}× the time per run in steady state"
    return None


def _reason(shipped: str, samples: Mapping[str, PlanSamples], refused: Sequence[str]) -> str:
    default = samples[DEFAULT]
    if shipped == DEFAULT:
        why = "; ".join(refused) or "no other plan could be measured"
        return f"default ONNX Runtime ({_figures(default)}) is shipped: {why}"
    chosen = samples[shipped]
    sooner = ratio_of_medians(default.first_result_ms, chosen.first_result_ms)
    steady = ratio_of_medians(chosen.steady_ms, default.steady_ms)
    sentence = (
        f"{shipped} gives its first result {sooner:.1f}× sooner than default ONNX Runtime at {steady:.2f}× "
        f"its time per run ({_figures(chosen)} against {_figures(default)})"
    )
    return f"{sentence}; {'; '.join(refused)}" if refused else sentence


def _without_default(shipped: str, samples: Mapping[str, PlanSamples]) -> str:
    figures = _figures(samples[shipped])
    return f"{shipped} is shipped uncompared ({figures}): default ONNX Runtime could not be measured"


def _figures(samples: PlanSamples) -> str:
    first, steady = summarise(samples.first_result_ms), summarise(samples.steady_ms)
    return f"first result {_spread(first)} ms, steady {_spread(steady)} ms"


def _spread(summary: Summary) -> str:
    return f"{summary.median:.4g} [{summary.p25:.4g}–{summary.p75:.4g}]"
