"""Does the search find the best plan of a recorded grid? `python -m bench.tune_replay [--seeds 20]`.

Simulated: a measurement returns a plan's recorded median with noise. `bench/results/tune.json` has the
figures of some ten plans of each grid; those of the others are estimated by a log-linear fit to the recorded
ones, with a factor for each value of each knob and for each pair of form and prepacking.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortprep.children.probe import ProbeResult
from ortprep.tuning.final import choose
from ortprep.tuning.objective import Objective
from ortprep.tuning.space import DEFAULT, FORM, PREPACKING, PlanChoice, Space
from tests.tuning.builders import CONVOLUTIONS, TRANSFORMER, choices_of, cpu_space, restrict
from tests.tuning.fakes import Machine, limits

RUNS_PER_LOAD = (1, 100, 100_000)
BUDGET_S = 180.0
SHARE = 0.35
"""Share of a grid's plans that a search may try."""

_CONVOLUTION_NETS = ("resnet50", "vgg19")
_FIGURES = ("init_ms", "first_ms", "steady_ms", "private_mb", "peak_mb")


def grid_of(model: str) -> Space:
    """Returns the plans of a recorded grid: two cores, and the knobs that `bench.tune` searched."""
    is_net = model in _CONVOLUTION_NETS
    space = cpu_space(CONVOLUTIONS if is_net else TRANSFORMER, cores=2, fixed_shapes=True)
    fixed = {"device_allocator": ("off",)}
    if is_net:
        fixed |= {"memory_arena": ("on",), "memory_pattern": ("on",)}
    return restrict(space, fixed)


def _result(
    init_ms: float, first_ms: float, steady_ms: float, private_mb: float, peak_mb: float
) -> ProbeResult:
    """Returns figures of one process, in the order of `_FIGURES`; every process starts in no time."""
    return ProbeResult(init_ms + first_ms, init_ms, first_ms, steady_ms, private_mb, peak_mb)


class Grid:
    """The figures of every plan of a grid, recorded or estimated."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.space = grid_of(record["model"])
        self._known: dict[PlanChoice, ProbeResult] = {}
        for search in record["searches"]:
            gone = ("level=", "form=inline")
            found = search["figures"].items()
            plans = {name: one for name, one in found if not any(knob in name for knob in gone)}
            for name, figures in plans.items():
                medians = [figures[figure]["median"] for figure in _FIGURES]
                self._known[self._parse(name)] = _result(*medians)
        factors = {factor for choice in choices_of(self.space) for factor in self._factors(choice)}
        self._columns = {factor: column for column, factor in enumerate(sorted(factors))}
        self._logs = self._fit()

    def figures(self, choice: PlanChoice) -> ProbeResult:
        """Returns what a plan costs."""
        if choice in self._known:
            return self._known[choice]
        medians = [float(one) for one in np.exp(self._row(choice) @ self._logs)]
        return _result(*medians)

    def _parse(self, name: str) -> PlanChoice:
        if name == "default":
            return DEFAULT
        choice = self.space.base
        for change in name.split() if "=" in name else ():
            choice = choice.but(*change.split("="))
        return choice

    def _factors(self, choice: PlanChoice) -> Iterator[tuple[str, ...]]:
        values = choice.as_dict()
        yield values[FORM], values[PREPACKING]
        base = self.space.base
        for knob, value in choice.values:
            if knob in (FORM, PREPACKING) or value != base[knob]:
                yield (f"{knob}={value}",)

    def _row(self, choice: PlanChoice) -> NDArray[np.float64]:
        row = np.zeros(len(self._columns) + 1)
        row[[self._columns[factor] for factor in self._factors(choice)]] = 1
        row[-1] = 1
        return row

    def _fit(self) -> NDArray[np.float64]:
        """Returns the logarithm of each factor for each figure, by least squares with a small penalty."""
        plans = {choice: figures for choice, figures in self._known.items() if choice != DEFAULT}
        rows = np.array([self._row(choice) for choice in plans])
        seen = [[math.log(getattr(one, figure)) for figure in _FIGURES] for one in plans.values()]
        # A pair has a factor of its own only as far as those of its values do not explain it.
        penalty = [0.2 if len(factor) == 2 else 0.05 for factor in self._columns] + [1e-9]
        squares = rows.T @ rows + np.diag(penalty)
        fitted: NDArray[np.float64] = np.linalg.solve(squares, rows.T @ np.array(seen))
        return fitted


class _Machine(Machine):
    """Takes as long for a process as a trial does: start, session, and 0.3 s of runs, at least five."""

    def process_s(self, figures: ProbeResult) -> float:
        return self.start_s + (figures.ready_ms + max(300.0, 5 * figures.steady_ms)) / 1e3


def replay(grid: Grid, runs_per_load: int, *, seeds: int, noise: float) -> dict[str, float]:
    """Searches a grid with each seed; returns what the chosen plans cost and what the searches took."""
    objective, plans = Objective(runs_per_load=runs_per_load), tuple(choices_of(grid.space))
    best = min(objective.cost_ms(grid.figures(choice)) for choice in plans)
    ratios, trials, processes = [], [], []
    for seed in range(seeds):
        machine = _Machine(grid, grid.space, seed=seed, noise=noise)  # type: ignore[arg-type]
        found = machine.search(objective, limits(BUDGET_S, int(SHARE * len(plans))))
        chosen = choose(grid.space, objective, found).choice
        ratios.append(objective.cost_ms(grid.figures(chosen)) / best)
        trials.append(len(found.trials))
        processes.append(machine.measured.total())
    within = sum(ratio <= 1.03 for ratio in ratios) / seeds
    return {
        "cost": median(ratios),
        "within_3_percent": within,
        "trials": mean(trials),
        "processes": mean(processes),
    }


def main() -> None:
    """Prints a row per model and runs per load, and the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--noise", type=float, default=0.05, help="distance between quartiles")
    options = parser.parse_args()
    recorded = json.loads((Path(__file__).parent / "results" / "tune.json").read_text(encoding="utf-8"))
    rows = []
    print("| model | runs per load | cost, of the best | within 3 % | trials | processes |")
    print("|---|---|---|---|---|---|")
    for record in recorded["models"]:
        grid = Grid(record)
        for runs in RUNS_PER_LOAD:
            row = replay(grid, runs, seeds=options.seeds, noise=options.noise)
            rows.append(row)
            shown = f"{row['cost']:.3f} | {row['within_3_percent']:.0%} | {row['trials']:.1f}"
            print(f"| {record['model']} | {runs} | {shown} | {row['processes']:.0f} |", flush=True)
    good = sum(row["cost"] <= 1.03 for row in rows)
    share, trials = (mean(row[figure] for row in rows) for figure in ("within_3_percent", "trials"))
    print(f"\nwithin 3 %: {good} of {len(rows)} medians, {share:.0%} of the searches; {trials:.1f} trials")


if __name__ == "__main__":
    main()
