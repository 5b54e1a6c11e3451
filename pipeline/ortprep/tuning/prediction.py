"""Predicted cost of a plan that was not tried. Pure.

Every value of every knob multiplies the time to the first result, the time of a run and the memories by a
factor of its own. Ridge regression of logarithms fits the factors to the trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortprep.tuning.objective import Figures, Objective, Trial
from ortprep.tuning.space import PlanChoice, Space

_RIDGE = 0.05
"""Keeps a factor near 1 until trials say otherwise; small beside the one that a single trial brings."""

_LEAST = 1e-3

_NO_EFFECT = (0.0, 0.0, 0.0, 0.0)

_READERS: tuple[Callable[[Figures], float], ...] = (
    lambda figures: figures.ready_ms,
    lambda figures: figures.steady_ms,
    lambda figures: figures.private_mb,
    lambda figures: figures.gpu_mb or 0.0,
)
"""The figures that have a factor, in the order of `Prediction`."""


@dataclass(frozen=True)
class Prediction:
    """Ratios to the anchor."""

    first_result: float
    steady: float
    private: float
    gpu: float


@dataclass(frozen=True)
class Predictor:
    """Factors learnt from trials.

    Attributes:
        features: (knob, value) pairs that have a factor.
        weights: Logarithms of the factors, one row per feature, the last for all plans; one column a figure.
        hopeless: (knob, value) pairs whose every trial failed.
    """

    features: tuple[tuple[str, str], ...]
    weights: NDArray[np.float64]
    anchor: Figures
    hopeless: frozenset[tuple[str, str]]

    @cached_property
    def _effects(self) -> Mapping[tuple[str, str], Sequence[float]]:
        """Logarithms by value, as plain numbers: a search predicts thousands of plans at a time."""
        return dict(zip(self.features, self.weights[:-1].tolist(), strict=True))

    @cached_property
    def _usual(self) -> Sequence[float]:
        usual: list[float] = self.weights[-1].tolist()
        return usual

    def predict(self, choice: PlanChoice) -> Prediction:
        """Returns the ratios of a plan's figures to the anchor's."""
        first, steady, private, gpu = self._usual
        for value in choice.values:
            own = self._effects.get(value, _NO_EFFECT)
            first, steady, private, gpu = first + own[0], steady + own[1], private + own[2], gpu + own[3]
        return Prediction(*(math.exp(min(max(log, -50.0), 50.0)) for log in (first, steady, private, gpu)))

    def cost(self, choice: PlanChoice, objective: Objective) -> float:
        """Returns a plan's cost relative to the anchor's; infinite if it cannot work or exceeds a limit."""
        if self.hopeless & set(choice.values):
            return float("inf")
        ratios = self.predict(choice)
        runs = objective.runs_per_load - 1
        limits = (
            (ratios.steady, objective.max_steady_ratio),
            (ratios.private * self.anchor.private_mb, objective.max_private_mb),
            (ratios.gpu * (self.anchor.gpu_mb or 0.0), objective.max_gpu_mb),
        )
        # A limit that is nearly kept may be kept after all: that is for the trial to say.
        if any(limit is not None and value > 1.1 * limit for value, limit in limits):
            return float("inf")
        first, steady = self.anchor.ready_ms, self.anchor.steady_ms
        return (ratios.first_result * first + runs * ratios.steady * steady) / (first + runs * steady)

    def simplify(self, space: Space, choice: PlanChoice, objective: Objective, factor: float) -> PlanChoice:
        """Returns the plan without the changes whose removal keeps its cost within a factor."""
        base, limit = space.base, self.cost(choice, objective) * factor
        for knob in space.knobs:
            plainer = space.canonical(choice.but(knob.name, base[knob.name]))
            if plainer != choice and self.cost(plainer, objective) <= limit:
                choice = plainer
        return choice


def fit(space: Space, trials: Iterable[Trial]) -> Predictor | None:
    """Learns from the trials of a space; None if none of them gave figures."""
    known = [trial for trial in trials if _is_of(space, trial.choice)]
    good = [trial for trial in known if trial.figures and trial.failure is None]
    if not good:
        return None
    base = space.base
    features = tuple(
        (knob.name, value) for knob in space.knobs for value in knob.values if value != base[knob.name]
    )
    rows = np.array([_row(trial.choice, features) for trial in good])
    targets = np.array([_log_ratios(trial) for trial in good])
    penalty = np.full(len(features) + 1, _RIDGE)
    penalty[-1] = 1e-9
    weights = np.linalg.solve(rows.T @ rows + np.diag(penalty), rows.T @ targets)
    anchors = [anchor for trial in good for anchor in trial.anchors]
    return Predictor(features, weights, _median_figures(anchors), _hopeless(base, known))


def _is_of(space: Space, choice: PlanChoice) -> bool:
    values = choice.as_dict()
    return all(knob.name in values for knob in space.knobs)


def _row(choice: PlanChoice, features: Sequence[tuple[str, str]]) -> NDArray[np.float64]:
    chosen = set(choice.values)
    return np.array([*(1.0 if feature in chosen else 0.0 for feature in features), 1.0])


def _log_ratios(trial: Trial) -> list[float]:
    pairs = list(zip(trial.figures, trial.anchors, strict=True))
    return [
        median([math.log(max(read(one), _LEAST) / max(read(anchor), _LEAST)) for one, anchor in pairs])
        for read in _READERS
    ]


def _median_figures(figures: Sequence[Figures]) -> Figures:
    values = {
        field.name: [value for one in figures if (value := getattr(one, field.name)) is not None]
        for field in fields(Figures)
    }
    medians: dict[str, Any] = {name: median(found) if found else None for name, found in values.items()}
    return Figures(**medians)


def _hopeless(base: PlanChoice, trials: Sequence[Trial]) -> frozenset[tuple[str, str]]:
    """Returns the values that were tried and never worked, the base's excepted."""
    tried: dict[tuple[str, str], list[bool]] = {}
    for trial in trials:
        for value in set(trial.choice.values) - set(base.values):
            tried.setdefault(value, []).append(trial.failure is None)
    return frozenset(value for value, worked in tried.items() if not any(worked))
