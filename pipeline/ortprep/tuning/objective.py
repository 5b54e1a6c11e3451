"""Cost and limits of a plan. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median

from ortprep.children.probe import ProbeResult
from ortprep.measuring.comparison import is_below, paired_ratio
from ortprep.spec.models import TuneSpec
from ortprep.tuning.space import PlanChoice

Reader = Callable[[ProbeResult], float]
"""Reads one figure of a process."""

ready_ms: Reader = attrgetter("ready_ms")
steady_ms: Reader = attrgetter("steady_ms")

Finals = Mapping[PlanChoice, Sequence[ProbeResult]]
"""Figures by plan, the k-th of each from the same round."""


@dataclass
class Trial:
    """One plan that was tried; a search adds its figures round by round.

    Attributes:
        baselines: Figures of the plan it is compared with, each from the same round as its own.
        failure: Reason why it gave no figures, or failed after it gave some; None if it works.
    """

    number: int
    choice: PlanChoice
    figures: list[ProbeResult] = field(default_factory=list)
    baselines: list[ProbeResult] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class PlanSearchResult:
    """Result of a search.

    Attributes:
        trials: Every plan that was tried, in order.
        finals: Figures of the last comparison, of three rounds at least, the baseline's included. A plan that
            failed is absent.
        elapsed_s: Seconds that the search took.
    """

    trials: tuple[Trial, ...]
    finals: Finals
    baseline: PlanChoice
    elapsed_s: float


class Objective(TuneSpec):
    """A spec's section `tune`, with the cost of a job per session and what exceeds the limits."""

    @classmethod
    def of(cls, tune: TuneSpec, **changes: object) -> Objective:
        """Returns what a spec asks for, with other values of some keys."""
        return cls.model_construct(**{**dict(tune), **changes})

    def cost_ms(self, figures: ProbeResult) -> float:
        """Returns the cost of a job from the start of its process to its last run."""
        return self.pair_cost_ms(figures, figures)

    def pair_cost_ms(self, first: ProbeResult, second: ProbeResult) -> float:
        """Returns the cost of a job that starts on one plan and continues on another.

        The first plan serves while the second session is created; the later runs are the second plan's.
        """
        later = self.runs_per_load - 1
        meanwhile = min(later, second.init_ms / first.steady_ms) if first.steady_ms > 0 else 0
        return first.ready_ms + meanwhile * first.steady_ms + (later - meanwhile) * second.steady_ms

    def violations(self, figures: Sequence[ProbeResult]) -> tuple[str, ...]:
        """Returns the limits that a plan's medians exceed, one phrase each."""
        limit, private_mb = self.max_private_mb, _median_private_mb(figures)
        if limit is None or private_mb <= limit:
            return ()
        return (f"private memory {private_mb:.4g} MB, allowed {limit:.4g}",)

    def ratios(self, figures: Sequence[ProbeResult], baselines: Sequence[ProbeResult]) -> tuple[float, ...]:
        """Returns a plan's costs relative to the baseline's, round by round."""
        return tuple(
            self.cost_ms(one) / self.cost_ms(baseline)
            for one, baseline in zip(figures, baselines, strict=True)
            if self.cost_ms(baseline) > 0
        )

    def score(self, trial: Trial) -> float:
        """Returns a trial's median cost relative to the baseline's; infinite where it failed.

        What exceeds a limit is dearer in proportion.
        """
        ratios = self.ratios(trial.figures, trial.baselines)
        if not ratios or trial.failure is not None:
            return math.inf
        limit = self.max_private_mb
        excess = 1.0 if limit is None else max(1.0, _median_private_mb(trial.figures) / limit)
        return median(ratios) * excess

    def keeps_limits(self, trial: Trial) -> bool:
        """Says whether a trial gave figures, and they keep every limit."""
        works = bool(trial.figures) and trial.failure is None
        return works and not self.violations(trial.figures)


def _median_private_mb(figures: Sequence[ProbeResult]) -> float:
    return median([one.private_mb for one in figures])


def ratio(figures: Sequence[ProbeResult], others: Sequence[ProbeResult], read: Reader) -> float:
    """Returns the ratio of a figure of two plans, by pairs of the same rounds."""
    return paired_ratio(_values(figures, read), _values(others, read))


def is_less(
    figures: Sequence[ProbeResult],
    others: Sequence[ProbeResult],
    read: Reader,
    *,
    min_gain: float = 0.0,
) -> bool:
    """Says whether a figure of one plan is smaller beyond the noise, by pairs of the same rounds.

    `min_gain` is the share that it has to be smaller by at least.
    """
    return is_below(_values(figures, read), _values(others, read), min_gain=min_gain)


def _values(figures: Sequence[ProbeResult], read: Reader) -> list[float]:
    return [read(one) for one in figures]
