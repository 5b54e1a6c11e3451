"""Speed-up of a bundle and its certainty, from the recorded figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.manifest import Manifest, VariantRecord
from ortprep.measuring.shipped import FORKED, find_plan
from ortprep.report.content import Fact
from ortprep.tables import ABSENT, Tone, count_of, format_ratio

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
    "80 % of the rounds. Ranges go from quartile to quartile; ± is half their distance."
)


@dataclass(frozen=True)
class Ratio:
    """Ratio of two figures.

    Attributes:
        value: Ratio of their medians.
        low: Ratio with the nearer quartiles.
        high: Ratio with the further ones.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{format_ratio(self.value)} [{format_ratio(self.low)}–{format_ratio(self.high)}]"


def compare(above: Samples, below: Samples) -> Ratio | None:
    """Returns how many times larger one figure is than another; None where that is no number."""
    if above is below:
        return Ratio(1.0, 1.0, 1.0)
    if min(below.p25, below.median) <= 0 or not all(map(math.isfinite, (above.p25, above.p75, below.p75))):
        return None
    return Ratio(above.median / below.median, above.p25 / below.p75, above.p75 / below.p25)


GAINS: tuple[tuple[str, Callable[[PlanFigures, PlanFigures], Ratio | None]], ...] = (
    ("ready sooner", lambda default, plan: compare(default.ready_ms, plan.ready_ms)),
    ("init sooner", lambda default, plan: compare(default.init_ms, plan.init_ms)),
    ("time per run, of default’s", lambda default, plan: compare(plan.steady_ms, default.steady_ms)),
    ("private memory, of default’s", lambda default, plan: compare(plan.private_mb, default.private_mb)),
)
"""What a gain consists of: a label, and the ratio of the default's and the shipped plan's figures."""


@dataclass(frozen=True)
class Gain:
    """Gain of a prepared variant, measured warm.

    Attributes:
        shipped: Name of the plan that is shipped.
        certainty: Whether it is sooner.
        rounds: Fresh processes per plan.
        default: Figures of the default plan, None where it could not be measured.
        plan: Figures of the shipped plan.
        ratios: One for each of `GAINS`, None where there is none.
    """

    shipped: str
    certainty: Certainty
    rounds: int
    default: PlanFigures | None
    plan: PlanFigures | None
    ratios: tuple[Ratio | None, ...]

    @property
    def ready(self) -> Ratio | None:
        """Ratio of the default plan's ready time to the shipped plan's."""
        return self.ratios[0]


def find_gain(variant: VariantRecord) -> Gain | None:
    """Returns what was gained by the measurement that decides, None where nothing was measured or decided."""
    by_cache = {one.cache: one for one in reversed(variant.measurements)}
    measurement = by_cache.get(FORKED) or by_cache.get("warm") or next(iter(variant.measurements), None)
    if measurement is None or variant.decision is None:
        return None
    shipped = variant.decision.shipped
    default, plan = find_plan(measurement, DEFAULT), find_plan(measurement, shipped)
    ratios = tuple(read(default, plan) if default and plan else None for _, read in GAINS)
    certainty: Certainty = "beyond the noise" if variant.decision.faster else "within the noise"
    if default is None:
        certainty = "not compared"
    elif shipped == DEFAULT:
        certainty = "default shipped"
    return Gain(shipped, certainty, measurement.rounds, default, plan, ratios)


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
    facts = []
    for (label, _), ratio in zip(GAINS, gain.ratios, strict=True):
        is_ready = label == GAINS[0][0]
        sure = f"{gain.certainty}, {count_of(gain.rounds, 'round')}"
        tone: Tone = TONES[gain.certainty] if is_ready else "plain"
        if ratio is None:
            facts += [Fact(ABSENT, label, sure, tone)] if is_ready else []
            continue
        if not is_ready:
            apart = ratio.low > 1 or ratio.high < 1
            sure = "quartiles apart" if apart else "quartiles overlap"
            tone = "good" if label.endswith("sooner") and ratio.low > 1 else "plain"
        span = f"{format_ratio(ratio.low)} to {format_ratio(ratio.high)}"
        facts.append(Fact(format_ratio(ratio.value), label, f"{span}, {sure}", tone))
    return tuple(facts)
