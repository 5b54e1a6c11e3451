"""How much sooner, and how sure: what may be claimed of what was recorded. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Literal, TypeAlias

from ortprep.bundle.manifest import Manifest, MeasurementRecord, VariantRecord
from ortprep.bundle.tuning_record import Summary
from ortprep.measuring.shipped import find_plan
from ortprep.report.content import Fact, Tone
from ortprep.report.formatting import count_of, format_ratio

DEFAULT = "default"
"""The plan every other one is compared with: the source model in plain ONNX Runtime."""

Certainty: TypeAlias = Literal["beyond the noise", "within the noise", "default shipped", "not compared"]

TONES: dict[Certainty, Tone] = {
    "beyond the noise": "good",
    "within the noise": "warning",
    "default shipped": "warning",
    "not compared": "plain",
}

HOW_SURE = (
    "“Ready” is the time from the start of a process to its first result, imports and checks included. "
    "“Beyond the noise” is the verdict of the measurement itself: plans take turns, one fresh process each; "
    "the quartile ranges of when they are ready do not overlap, and the prepared plan was sooner in at least "
    "80\u00a0% of the rounds. Ranges go from quartile to quartile; ± is half their distance."
)


@dataclass(frozen=True)
class Ratio:
    """How two figures compare.

    Attributes:
        value: Ratio of their medians.
        low: With the nearer quartiles.
        high: With the further ones.
    """

    value: float
    low: float
    high: float

    @property
    def is_apart(self) -> bool:
        """Whether the quartile ranges do not overlap."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        return f"{format_ratio(self.value)} [{format_ratio(self.low)}–{format_ratio(self.high)}]"


@dataclass(frozen=True)
class Gain:
    """What preparing a variant achieved, warm.

    Attributes:
        shipped: The plan that is shipped.
        certainty: Whether it is sooner.
        rounds: Fresh processes per plan.
        ready: Default's time by the shipped plan's: how many times sooner.
        init: The same for init.
        steady: The shipped plan's time per run by the default's.
        private: The same for private memory.
        default_ready: The default's figures, None where it could not be measured.
        shipped_ready: The shipped plan's.
    """

    shipped: str
    certainty: Certainty
    rounds: int
    ready: Ratio | None
    init: Ratio | None
    steady: Ratio | None
    private: Ratio | None
    default_ready: Summary | None
    shipped_ready: Summary | None


def compare(above: Summary, below: Summary) -> Ratio | None:
    """Returns how many times larger one figure is than another; None where that is no number."""
    if above is below:
        return Ratio(1.0, 1.0, 1.0)
    if min(below.p25, below.median) <= 0 or not all(map(math.isfinite, (above.p25, above.p75, below.p75))):
        return None
    return Ratio(above.median / below.median, above.p25 / below.p75, above.p75 / below.p25)


def find_warm(variant: VariantRecord) -> MeasurementRecord | None:
    """Returns the measurement that decides: the warm one, else the first."""
    warm = [one for one in variant.measurements if one.cache == "warm"]
    return next(iter((*warm, *variant.measurements)), None)


def find_gain(variant: VariantRecord) -> Gain | None:
    """Returns what was gained, None where nothing was measured or decided."""
    measurement = find_warm(variant)
    if measurement is None or variant.decision is None:
        return None
    shipped = find_plan(measurement, variant.decision.shipped)
    default = find_plan(measurement, DEFAULT)
    certainty = _certainty(variant, measurement)
    if shipped is None or default is None:
        both = [plan.ready_ms if plan else None for plan in (default, shipped)]
        return Gain(variant.decision.shipped, certainty, measurement.rounds, None, None, None, None, *both)
    return Gain(
        variant.decision.shipped,
        certainty,
        measurement.rounds,
        ready=compare(default.ready_ms, shipped.ready_ms),
        init=compare(default.init_ms, shipped.init_ms),
        steady=compare(shipped.steady_ms, default.steady_ms),
        private=compare(shipped.private_mb, default.private_mb),
        default_ready=default.ready_ms,
        shipped_ready=shipped.ready_ms,
    )


def _certainty(variant: VariantRecord, measurement: MeasurementRecord) -> Certainty:
    if variant.decision is None or find_plan(measurement, DEFAULT) is None:
        return "not compared"
    if variant.decision.shipped == DEFAULT:
        return "default shipped"
    return "beyond the noise" if variant.decision.faster else "within the noise"


def headline_variant(manifest: Manifest) -> VariantRecord | None:
    """Returns the variant whose gain stands for the model: the first that was measured."""
    return next((variant for variant in manifest.variants if find_gain(variant)), None)


def describe_gain(gain: Gain | None) -> str:
    """Returns what was gained, in a few words."""
    if gain is None:
        return "not measured"
    if gain.certainty == "default shipped":
        return "not sooner; default ONNX Runtime is shipped"
    if gain.ready is None:
        return f"ships {gain.shipped}, not compared with default ONNX Runtime"
    return f"ready {format_ratio(gain.ready.value)} sooner, {gain.certainty}"


def build_gain_facts(gain: Gain | None) -> tuple[Fact, ...]:
    """Returns the figures at the head of a variant."""
    if gain is None:
        return ()
    sure = f"{gain.certainty}, {count_of(gain.rounds, 'round')}"
    facts = [_ready_fact(gain, sure)]
    named = (
        ("init sooner", gain.init, "good"),
        ("time per run, of default’s", gain.steady, "plain"),
        ("private memory, of default’s", gain.private, "plain"),
    )
    for label, ratio, tone in named:
        if ratio is not None:
            apart = "quartiles apart" if ratio.is_apart else "quartiles overlap"
            shown: Tone = "good" if tone == "good" and ratio.low > 1 else "plain"
            facts.append(Fact(format_ratio(ratio.value), label, f"{_bracket(ratio)}, {apart}", shown))
    return tuple(facts)


def _ready_fact(gain: Gain, sure: str) -> Fact:
    tone = TONES[gain.certainty]
    if gain.ready is None:
        return Fact("–", "ready sooner", sure, tone)
    return Fact(format_ratio(gain.ready.value), "ready sooner", f"{_bracket(gain.ready)}, {sure}", tone)


def _bracket(ratio: Ratio) -> str:
    return f"{format_ratio(ratio.low)} to {format_ratio(ratio.high)}"


def mean_ratio(ratios: list[Ratio]) -> float | None:
    """Returns the geometric mean of what several ratios say, None of none."""
    return geometric_mean([ratio.value for ratio in ratios]) if ratios else None
