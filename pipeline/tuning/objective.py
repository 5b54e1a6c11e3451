"""What a plan costs a job, what it must not exceed, and how plans compare at other numbers of runs. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.tuning.space import Choice


@dataclass(frozen=True)
class Figures:
    """What one process measured.

    Attributes:
        init_ms: Making the session.
        first_ms: First run, primary shape.
        steady_ms: A later run, weighted over the declared shapes.
        private_mb: Anonymous memory after the last run, in MB of 2**20 bytes.
        peak_mb: Largest resident set, likewise.
        gpu_mb: GPU memory, None without GPU.
    """

    init_ms: float
    first_ms: float
    steady_ms: float
    private_mb: float
    peak_mb: float
    gpu_mb: float | None = None

    @property
    def first_result_ms(self) -> float:
        """Session and first run together."""
        return self.init_ms + self.first_ms


@dataclass(frozen=True)
class Trial:
    """One plan that was tried.

    Attributes:
        number: In the order they were tried.
        kind: Why: `default`, `recipe`, `base`, `screening`, `combination`, `sampler` or `final`.
        choice: The plan.
        figures: One entry per process.
        anchors: Figures of the plan it is compared with, each from the same round as its own.
        failure: Why it gave no figures, None if it did.
        elapsed_s: What trying it took, its share of the anchor's processes left out.
    """

    number: int
    kind: str
    choice: Choice
    figures: tuple[Figures, ...]
    anchors: tuple[Figures, ...]
    failure: str | None = None
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class Objective:
    """What a job pays per session, and what it cannot pay.

    Attributes:
        runs_per_load: Runs of a session before it is gone.
        max_private_mb: Most private memory after the runs, in MB of 2**20 bytes.
        max_gpu_mb: Most GPU memory, likewise.
        max_steady_ratio: Longest later run, relative to default ONNX Runtime.
    """

    runs_per_load: int
    max_private_mb: float | None = None
    max_gpu_mb: float | None = None
    max_steady_ratio: float | None = None

    def cost_ms(self, figures: Figures) -> float:
        """Returns what a session costs from load to its last run."""
        return figures.first_result_ms + (self.runs_per_load - 1) * figures.steady_ms

    def violations(self, figures: Sequence[Figures], anchors: Sequence[Figures]) -> tuple[str, ...]:
        """Returns the limits that a plan's medians exceed, one phrase each."""
        gpu = [one.gpu_mb for one in figures if one.gpu_mb is not None]
        steady = median([one.steady_ms for one in figures]) / median([one.steady_ms for one in anchors])
        pairs = (
            ("private memory", median([one.private_mb for one in figures]), self.max_private_mb, "MB"),
            ("GPU memory", median(gpu) if gpu else 0.0, self.max_gpu_mb, "MB"),
            ("steady run", steady, self.max_steady_ratio, "× default"),
        )
        return tuple(
            f"{what} {value:.4g} {unit}, allowed {limit:.4g}"
            for what, value, limit, unit in pairs
            if limit is not None and value > limit
        )

    def ratios(self, figures: Sequence[Figures], anchors: Sequence[Figures]) -> tuple[float, ...]:
        """Returns a plan's costs relative to the anchor's, round by round."""
        return tuple(
            self.cost_ms(one) / self.cost_ms(anchor)
            for one, anchor in zip(figures, anchors, strict=True)
            if self.cost_ms(anchor) > 0
        )

    def score(self, trial: Trial) -> float:
        """Returns a trial's median cost relative to the anchor's; infinite where it failed."""
        ratios = self.ratios(trial.figures, trial.anchors)
        return median(ratios) if ratios and trial.failure is None else float("inf")

    def is_allowed(self, trial: Trial) -> bool:
        """Says whether a trial gave figures that keep every limit."""
        return (
            bool(trial.figures)
            and trial.failure is None
            and not self.violations(trial.figures, trial.anchors)
        )


@dataclass(frozen=True)
class Point:
    """A plan's place in the plane of first result and steady run, in ms."""

    number: int
    first_result_ms: float
    steady_ms: float


def points_of(trials: Sequence[Trial]) -> tuple[Point, ...]:
    """Returns where the plans that gave figures are.

    Plans were measured at different times, on a machine that may have been slower then: each is placed by its
    ratio to the plan compared with, in the same rounds, times that plan's median over all rounds.
    """
    good = [trial for trial in trials if trial.failure is None and trial.figures]
    anchors = list(dict.fromkeys(anchor for trial in good for anchor in trial.anchors))
    return tuple(
        Point(
            trial.number,
            _placed([(a.first_result_ms, b.first_result_ms) for a, b in _pairs(trial)])
            * median([anchor.first_result_ms for anchor in anchors]),
            _placed([(a.steady_ms, b.steady_ms) for a, b in _pairs(trial)])
            * median([anchor.steady_ms for anchor in anchors]),
        )
        for trial in good
    )


def _pairs(trial: Trial) -> list[tuple[Figures, Figures]]:
    return list(zip(trial.figures, trial.anchors, strict=True))


def _placed(pairs: Sequence[tuple[float, float]]) -> float:
    return median([value / max(anchor, 1e-6) for value, anchor in pairs])


def find_front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Returns the plans that no other beats in both figures, soonest first result first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.first_result_ms, p.steady_ms, p.number)):
        if not front or point.steady_ms < front[-1].steady_ms:
            front.append(point)
    return tuple(front)


@dataclass(frozen=True)
class BreakEven:
    """From how many runs per load on one plan costs less than another.

    Attributes:
        sooner: Trial with the sooner first result.
        steadier: Trial with the shorter run.
        runs: Smallest number of runs per load at which `steadier` costs less.
    """

    sooner: int
    steadier: int
    runs: int


def find_break_evens(front: Sequence[Point]) -> tuple[BreakEven, ...]:
    """Returns where each plan of a front overtakes the one before it."""
    found = []
    for sooner, steadier in itertools.pairwise(front):
        lead_ms = steadier.first_result_ms - sooner.first_result_ms
        gain_ms = sooner.steady_ms - steadier.steady_ms
        if gain_ms > 0:
            found.append(BreakEven(sooner.number, steadier.number, 2 + int(lead_ms / gain_ms)))
    return tuple(found)


def summary_values(figures: Sequence[Figures], objective: Objective) -> Mapping[str, list[float]]:
    """Returns the values of every figure, cost included, by its name."""
    return {
        "init_ms": [one.init_ms for one in figures],
        "first_ms": [one.first_ms for one in figures],
        "first_result_ms": [one.first_result_ms for one in figures],
        "steady_ms": [one.steady_ms for one in figures],
        "private_mb": [one.private_mb for one in figures],
        "peak_mb": [one.peak_mb for one in figures],
        "gpu_mb": [one.gpu_mb for one in figures if one.gpu_mb is not None],
        "cost_ms": [objective.cost_ms(one) for one in figures],
    }
