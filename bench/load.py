"""How much sooner is a prepared model ready? Fresh processes, interleaved, medians.

    python -m bench.load [--models NAME …] [--rounds 7] [--out FILE.json]

Compares default ONNX Runtime on the source, the plain recipe (optimised file with its weights inline,
optimisation off) and `pipeline.runtime.load` on the bundle, its checks included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

from bench.machine import describe_machine
from bench.models import REPORTED, SPECS, PreparedModel, prepare_models
from pipeline.bundle.codec import encode
from pipeline.bundle.summary import Summary
from pipeline.errors import PipelineError, StageError
from pipeline.measuring.comparison import ratio_of_medians, separated, summarise
from pipeline.measuring.device_lock import measuring
from pipeline.measuring.rounds import run_rounds
from pipeline.runtime.child import run_child
from pipeline.runtime.loading.session import default_plan
from pipeline.runtime.probe import ProbeRequest, ProbeResult, measure_plan

SUMMARY = "Compares default ONNX Runtime, the plain recipe and the bundle."

DEFAULT, RECIPE, BUNDLE = "default", "recipe", "bundle"

FIGURES: Mapping[str, Callable[[ProbeResult], float]] = {
    "init_ms": lambda result: result.init_ms,
    "first_ms": lambda result: result.first_ms,
    "first_result_ms": lambda result: result.init_ms + result.first_ms,
    "ready_ms": lambda result: result.ready_ms,
    "steady_ms": lambda result: result.steady_ms,
    "private_mb": lambda result: result.private_mb,
    "peak_mb": lambda result: result.peak_mb,
}
"""What is reported of every process."""


@dataclass(frozen=True)
class Goal:
    """A bound on the geometric mean, over the models, of the ratio of the default's median to the bundle's.

    Attributes:
        figure: Key of `FIGURES`.
        title: Column of the table.
        least: Smallest acceptable mean.
        most: Largest acceptable mean, None for any.
    """

    figure: str
    title: str
    least: float = 0.0
    most: float | None = None

    def admits(self, mean: float) -> bool:
        """Says whether a mean is within the bounds."""
        return self.least <= mean and (self.most is None or mean <= self.most)

    def __str__(self) -> str:
        if self.most is None:
            return f"at least {self.least:g}"
        return f"{self.least:g} to {self.most:g}" if self.least else f"at most {self.most:g}"


GOALS = (
    Goal("init_ms", "init ×", least=4.0),
    Goal("first_result_ms", "first result ×", least=2.5),
    Goal("steady_ms", "steady", least=0.95, most=1.03),
    Goal("private_mb", "private", most=0.6),
)
"""The project's goals. The first two are how many times sooner, the others the bundle relative to default."""


@dataclass(frozen=True)
class ModelReport:
    """One model's figures.

    Attributes:
        model: Its name.
        figures: Order statistics by plan and figure.
        ratios: Median ratios by plan and figure, so that more is better for times to a result and less is
            better for steady time and memory.
        slower: Whether the bundle's first result comes later than the default's beyond the noise.
    """

    model: str
    figures: Mapping[str, Mapping[str, Summary]]
    ratios: Mapping[str, Mapping[str, float]]
    slower: bool


def measure_model(model: PreparedModel, *, rounds: int, steady_s: float) -> ModelReport:
    """Measures a model's three plans.

    Args:
        model: What to load.
        rounds: Fresh processes per plan.
        steady_s: Seconds of repeated runs in each.

    Raises:
        StageError: A plan failed.
    """
    # On the disk that the others are read from; the temporary folder may be memory.
    with TemporaryDirectory(prefix="recipe-", dir=model.bundle.parent) as folder, measuring("cpu"):
        requests = _requests(model, Path(folder), steady_s)

        def measure(plan: str) -> ProbeResult:
            return measure_plan(requests[plan], timeout_s=600.0)

        run_rounds(tuple(requests), rounds=1, measure=measure)  # fills the page cache; not counted
        outcome = run_rounds(tuple(requests), rounds=rounds, measure=measure)
    if outcome.failures:
        raise StageError(f"cannot measure {model.name}\n  {dict(outcome.failures)}")
    return build_report(model.name, outcome.results)


def _requests(model: PreparedModel, folder: Path, steady_s: float) -> dict[str, ProbeRequest]:
    default = default_plan(str(model.source))
    recipe = default_plan(str(folder / "recipe.onnx"), level="ORT_DISABLE_ALL")
    run_child(
        "pipeline.stages.measure.contenders:write_recipe", {"source": encode(default), "model": recipe.model}
    )
    sample = str(model.sample)
    return {
        DEFAULT: ProbeRequest(default, sample, steady_s),
        RECIPE: ProbeRequest(recipe, sample, steady_s),
        BUNDLE: ProbeRequest(None, sample, steady_s, bundle=str(model.bundle)),
    }


def build_report(model: str, results: Mapping[str, Sequence[ProbeResult]]) -> ModelReport:
    """Returns what the results of a model's plans say; the k-th of every plan is of the same round."""
    values = {
        plan: {name: [read(result) for result in of_plan] for name, read in FIGURES.items()}
        for plan, of_plan in results.items()
    }
    return ModelReport(
        model=model,
        figures={
            plan: {name: summarise(v) for name, v in figures.items()} for plan, figures in values.items()
        },
        ratios={
            plan: {goal.figure: _ratio(goal, values[DEFAULT], figures) for goal in GOALS}
            for plan, figures in values.items()
            if plan != DEFAULT
        },
        slower=separated(values[DEFAULT]["first_result_ms"], values[BUNDLE]["first_result_ms"]),
    )


def _ratio(goal: Goal, default: Mapping[str, Sequence[float]], plan: Mapping[str, Sequence[float]]) -> float:
    before, after = default[goal.figure], plan[goal.figure]
    return ratio_of_medians(before, after) if goal.least > 1 else ratio_of_medians(after, before)


def mean_ratios(reports: Sequence[ModelReport], plan: str) -> dict[str, float]:
    """Returns the geometric mean over the models of every goal's ratio."""
    return {goal.figure: geometric_mean(r.ratios[plan][goal.figure] for r in reports) for goal in GOALS}


def missed_goals(reports: Sequence[ModelReport]) -> tuple[str, ...]:
    """Returns the goals that the bundles do not reach, one line each."""
    means = mean_ratios(reports, BUNDLE)
    missed = [
        f"{goal.title}: expected {goal}, got {means[goal.figure]:.3f}"
        for goal in GOALS
        if not goal.admits(means[goal.figure])
    ]
    return (*missed, *(f"{report.model}: slower to its first result" for report in reports if report.slower))


def build_table(reports: Sequence[ModelReport]) -> str:
    """Returns a row per model and plan: medians of the figures that have goals, with their ratios."""
    columns = ("init ms", "first result ms", "steady ms", "private MB")
    lines = [f"{'model':<14} {'plan':<8}" + "".join(f" {column:>16}" for column in columns)]
    lines += [_row(report, plan) for report in reports for plan in report.figures]
    for plan in (RECIPE, BUNDLE):
        means = mean_ratios(reports, plan)
        cells = "".join(f" {means[goal.figure]:>15.2f}×" for goal in GOALS)
        lines.append(f"{'geometric mean':<14} {plan:<8}{cells}")
    return "\n".join(lines)


def _row(report: ModelReport, plan: str) -> str:
    ratios = report.ratios.get(plan, {})
    cells = []
    for goal in GOALS:
        ratio = f" ({ratios[goal.figure]:.2f}×)" if goal.figure in ratios else ""
        cells.append(f" {f'{report.figures[plan][goal.figure].median:.1f}{ratio}':>16}")
    return f"{report.model:<14} {plan:<8}{''.join(cells)}"


def build_json(reports: Sequence[ModelReport], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything that was measured, with the machine and the goals, as JSON types."""
    return {
        "question": "time to a ready session: default ONNX Runtime, plain recipe, bundle",
        "machine": dict(machine),
        "goals": encode(GOALS),
        "geometric_means": {plan: mean_ratios(reports, plan) for plan in (RECIPE, BUNDLE)},
        "missed": list(missed_goals(reports)),
        "models": encode(reports),
    }


def _measure_all(options: argparse.Namespace) -> list[ModelReport]:
    reports = []
    for model in prepare_models(options.models, options.artifacts.absolute()):
        reports.append(measure_model(model, rounds=options.rounds, steady_s=options.steady_s))
        print(_row(reports[-1], BUNDLE), file=sys.stderr)
    return reports


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares, measures and reports; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=SUMMARY)
    parser.add_argument("--models", nargs="+", choices=SPECS, default=list(REPORTED), metavar="NAME")
    parser.add_argument(
        "--rounds", type=int, default=7, choices=range(3, 100), metavar="N", help="processes per plan"
    )
    parser.add_argument("--steady-s", type=float, default=1.0, help="seconds of repeated runs per process")
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts/bench"))
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    try:
        reports = _measure_all(options)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.out:
        text = json.dumps(build_json(reports, describe_machine()), indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    missed = missed_goals(reports)
    print(build_table(reports))
    print("\n".join(f"missed: {line}" for line in missed) or "every goal reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
