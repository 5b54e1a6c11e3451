"""Comparison of the ways to load a model with the default, beyond the noise. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ortprep.children.probe import ProbeResult
from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.doctor_model import DEFAULT, PREPARE, PREPARED
from ortprep.measuring.comparison import MIN_ROUNDS, is_below, paired_ratio

Verdict: TypeAlias = Literal["less", "more", "within the noise", "too few rounds"]
Results: TypeAlias = Mapping[str, Sequence[ProbeResult]]
"""By way, one result a round, the k-th of all from the same round."""

MEASURES: dict[str, Callable[[ProbeResult], float]] = {
    "init_ms": lambda result: result.init_ms,
    "first_result_ms": lambda result: result.init_ms + result.first_ms,
    "steady_ms": lambda result: result.steady_ms,
    "private_mb": lambda result: result.private_mb,
}
"""Figures that are compared, by name."""

_WORTH = 0.95
_STEADY_ALLOWANCE = 1.03


@dataclass(frozen=True)
class VariationComparison:
    """One way against the default in one measure.

    Attributes:
        ratio: How many times the default's figure it is, paired by rounds.
        verdict: Whether that is larger than noise.
    """

    ratio: float
    verdict: Verdict


def compare(results: Results) -> dict[str, dict[str, VariationComparison]]:
    """Returns every way but the default against it, by measure; nothing where the default is missing."""
    default = results.get(DEFAULT)
    if not default:
        return {}
    return {
        name: {measure: _compare(value, own, default) for measure, value in MEASURES.items()}
        for name, own in results.items()
        if name != DEFAULT
    }


def _compare(
    value: Callable[[ProbeResult], float], own: Sequence[ProbeResult], default: Sequence[ProbeResult]
) -> VariationComparison:
    figures, default_figures = [value(result) for result in own], [value(result) for result in default]
    ratio = paired_ratio(figures, default_figures)
    if len(figures) < MIN_ROUNDS:
        return VariationComparison(ratio, "too few rounds")
    if is_below(figures, default_figures):
        return VariationComparison(ratio, "less")
    return VariationComparison(ratio, "more" if is_below(default_figures, figures) else "within the noise")


def find_in_comparison(
    comparisons: Mapping[str, Mapping[str, VariationComparison]], *, prepared: bool
) -> tuple[Finding, ...]:
    """Returns what the comparison shows."""
    found = {comparison.verdict for way in comparisons.values() for comparison in way.values()}
    if found == {"too few rounds"}:
        text = f"too few rounds to tell a difference from noise; at least {MIN_ROUNDS} are needed"
        return (Finding("too-few-rounds", "note", text, "ortprep doctor options … --rounds 5"),)
    if not comparisons:
        text = "nothing to compare with: the default is the source model in plain ONNX Runtime"
        hint = "name the ONNX file or the spec, not the bundle alone"
        return (Finding("nothing-compared", "note", text, hint),)
    return (*_soonest(comparisons, prepared=prepared), *_slower_runs(comparisons))


def _soonest(
    comparisons: Mapping[str, Mapping[str, VariationComparison]], *, prepared: bool
) -> Iterator[Finding]:
    sooner = {
        name: verdicts["first_result_ms"].ratio
        for name, verdicts in comparisons.items()
        if verdicts["first_result_ms"].verdict == "less"
        and verdicts["first_result_ms"].ratio < _WORTH
        and not (verdicts["steady_ms"].verdict == "more" and verdicts["steady_ms"].ratio > _STEADY_ALLOWANCE)
    }
    if not sooner:
        text = "no other way gives its first result sooner, beyond the noise, without slower runs"
        yield Finding("default-is-as-good", "ok", text)
        return
    best = min(sooner, key=lambda name: sooner[name])
    text = (
        f"{best}: first result {1 / sooner[best]:.1f}× sooner than the default, "
        f"runs {comparisons[best]['steady_ms'].ratio:.2f}× as long ({comparisons[best]['steady_ms'].verdict})"
    )
    if best == PREPARED:
        yield Finding("prepared-is-soonest", "ok", text)
    else:
        hint = "ortprep tune   (searches for a better plan; docs/tuning.md)" if prepared else PREPARE
        yield Finding("sooner-without-slower-runs", "advice", text, hint)


def _slower_runs(comparisons: Mapping[str, Mapping[str, VariationComparison]]) -> Iterator[Finding]:
    for name, verdicts in comparisons.items():
        steady = verdicts["steady_ms"]
        if steady.verdict == "more" and steady.ratio > _STEADY_ALLOWANCE:
            text = f"{name}: runs take {steady.ratio:.2f}× the default's time, beyond the noise"
            yield Finding("slower-runs", "note", text)
