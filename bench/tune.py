"""Does the search find what an exhaustive one would, and what is that worth? `python -m bench.tune`.

For each model and number of runs per load, a search has a quarter of the trials of the whole space. Then
every plan of the space is measured once (the grid). The choices, the best plans of the grid and the default
are measured again, in the same rounds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any

from bench.models import SPECS, source_of
from bench.result_file import describe_machine, format_results
from ortprep.build.build_plan import plan_builds
from ortprep.build.execution import Task, open_context
from ortprep.build.receipts import read_receipt
from ortprep.build.runner import run_builds
from ortprep.bundle.codec import decode, encode
from ortprep.bundle.figures import PlanFigures, Samples
from ortprep.bundle.manifest import TuningRecord
from ortprep.children.probe import ProbeResult, join_results
from ortprep.cli.progress import BuildObserver
from ortprep.errors import PipelineError
from ortprep.measuring.comparison import order_of_round, paired_ratio, standard_error
from ortprep.measuring.device_lock import measuring
from ortprep.stages.core.results import PreparedResult
from ortprep.stages.tune.search_context import SearchContext, open_search
from ortprep.tuning.objective import Objective
from ortprep.tuning.space import DEFAULT, PlanChoice, Space
from tests.tuning.builders import choices_of

MODELS = ("resnet50", "vgg19", "bert-base", "gpt2", "bilstm")
RUNS_PER_LOAD = (1, 100, 100_000)
RIVALS = 4
"""Best plans of the grid that are measured afresh, for each number of runs."""

ANCHOR_EVERY = 8
"""Plans of the grid between two measurements of the default, to which they are related."""

_SAME = """\
runtime:
  session_config: {session.use_device_allocator_for_initializers: 0}
"""
_CONVOLUTIONS = f"{_SAME}  enable_cpu_mem_arena: true\n  enable_mem_pattern: true\n"
FIXED = {"resnet50": _CONVOLUTIONS, "vgg19": _CONVOLUTIONS}
"""Options that are not searched, by model, so that the whole space can be measured; others fix `_SAME`.

Form, prepacking, threads and spinning are searched everywhere, memory arena and pattern where there are no
convolutions.
"""

GOAL_COST, GOAL_SHARE = 1.03, 0.25
GOAL_FIRST, GOAL_INIT = 5.0, 20.0


@dataclass(frozen=True)
class ChoiceReport:
    """One search and the value of its choice.

    Attributes:
        runs_per_load: Runs per load of the objective.
        trials: Plans that were tried.
        share: Their share of the grid.
        elapsed_s: Duration of the search, in seconds.
        choice: The plan chosen.
        best: The cheapest plan of the grid in the second measurement.
        cost_ratio: Cost of the choice relative to that plan's, by pairs of the second measurement. That plan
            is the best of several noisy ones, so the ratio of two equal plans is above 1.
        cost_error: Standard error of the ratio.
        init_ratio: Init of default ONNX Runtime relative to the choice's.
        first_result_ratio: First result of default ONNX Runtime relative to the choice's.
        steady_ratio: The choice's run relative to default ONNX Runtime's.
        default_agrees: Whether the quartiles of the search's figures of the default overlap those afresh.
        figures: Costs and times by plan, measured afresh.
    """

    runs_per_load: int
    trials: int
    share: float
    elapsed_s: float
    choice: str
    best: str
    cost_ratio: float
    cost_error: float
    init_ratio: float
    first_result_ratio: float
    steady_ratio: float
    default_agrees: bool
    figures: Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class ModelReport:
    """One model: the size of its grid, how long it took, and the searches."""

    model: str
    grid: int
    searches: tuple[ChoiceReport, ...]


class Bench:
    """One model's specs, tasks and files."""

    def __init__(self, model: str, artifacts: Path, options: argparse.Namespace) -> None:
        self.model, self.artifacts, self.options = model, artifacts, options
        self.configs = artifacts / "configs-tune"

    def write_spec(self, runs_per_load: int, *, max_trials: int) -> None:
        """Writes the spec of one search."""
        tune = (
            f"tune:\n  runs_per_load: {runs_per_load}\n  max_trials: {max_trials}\n"
            f"  budget_s: {self.options.budget_s}\n  steady_s: {self.options.steady_s}\n"
            f"{FIXED.get(self.model, _SAME)}"
        )
        self.configs.mkdir(parents=True, exist_ok=True)
        text = (
            f"name: {self.model}\nsource: {source_of(self.model)}\ntargets: [cpu]\n{SPECS[self.model]}{tune}"
        )
        (self.configs / f"{self.model}.yaml").write_text(text, encoding="utf-8")

    def tasks(self) -> tuple[Task, ...]:
        """Returns the tasks up to the one that searches, which is the last."""
        (tasks,) = plan_builds(self.configs, self.artifacts, names=(self.model,))
        stages = [task.id.stage for task in tasks]
        return tasks[: stages.index("tune") + 1]

    def tune(self) -> TuningRecord:
        """Searches as a build would; raises the error of a task that fails."""
        tasks = self.tasks()
        for error in run_builds((tasks,), BuildObserver()):
            raise error
        receipt = read_receipt(tasks[-1].receipt)
        record = None if receipt is None else decode(PreparedResult, receipt.result).record
        assert record is not None
        return record


def measure_model(bench: Bench, runs_per_load: Sequence[int]) -> ModelReport:
    """Searches for every number of runs, measures the grid, and measures the best plans again.

    Raises:
        PipelineError: Something other than a trial failed.
    """
    records = []
    bench.write_spec(runs_per_load[0], max_trials=3)
    with _opened(bench) as search_context:
        grid = tuple(choices_of(search_context.space))
        for runs in runs_per_load:
            bench.write_spec(runs, max_trials=int(GOAL_SHARE * len(grid)))
            records.append(bench.tune())
            print(f"{bench.model}, {runs}: {records[-1].reason}", file=sys.stderr)
        table = measure_grid(search_context, grid)
        found = measure_afresh(search_context, table, records, rounds=bench.options.rounds)
    reports = tuple(report(search_context.space, len(grid), record, found) for record in records)
    return ModelReport(bench.model, len(grid), reports)


@contextmanager
def _opened(bench: Bench) -> Iterator[SearchContext]:
    """Opens a model's search for measuring outside of it; searches once, so that all before it is done."""
    bench.tune()
    task = bench.tasks()[-1]
    with TemporaryDirectory(prefix=".tmp-bench~", dir=task.folder.parent) as name:
        folder = Path(name)
        context = open_context(task, folder, lambda line: print(line, file=sys.stderr))
        with open_search(context) as search_context:
            yield search_context


Table = Mapping[PlanChoice, tuple[ProbeResult, ProbeResult]]


def measure_grid(search_context: SearchContext, grid: Sequence[PlanChoice]) -> Table:
    """Measures every plan once, each beside a measurement of the default."""
    table: dict[PlanChoice, tuple[ProbeResult, ProbeResult]] = {}
    for choice in grid:
        search_context.load(choice)
    with measuring("cpu"):
        for index, choice in enumerate(grid):
            if index % ANCHOR_EVERY == 0:
                baseline = search_context.measure(DEFAULT)
            try:
                table[choice] = (search_context.measure(choice), baseline)
            except PipelineError as error:
                print(f"{choice} failed: {error.message}", file=sys.stderr)
    return table


Found = Mapping[PlanChoice, Sequence[ProbeResult]]


def measure_afresh(
    search_context: SearchContext, table: Table, records: Sequence[TuningRecord], *, rounds: int
) -> Found:
    """Measures the searches' choices, the grid's best plans for each and the default, in the same rounds."""
    lanes = dict.fromkeys([DEFAULT, *(_chosen(record) for record in records)])
    for record in records:
        objective = Objective(runs_per_load=record.runs_per_load)
        lanes |= dict.fromkeys(
            sorted(table, key=lambda one: objective.ratios([table[one][0]], [table[one][1]])[0])[:RIVALS]
        )
    found: dict[PlanChoice, list[ProbeResult]] = {lane: [] for lane in lanes}
    with measuring("cpu"):
        for index in range(rounds):
            for lane in order_of_round(tuple(lanes), index):
                found[lane].append(search_context.measure(lane))
    return found


def _chosen(record: TuningRecord) -> PlanChoice:
    return PlanChoice(tuple(record.trials[record.chosen].choice.items()))


def report(space: Space, grid: int, record: TuningRecord, found: Found) -> ChoiceReport:
    """Returns what a search's choice is worth, by pairs of figures of the same rounds."""
    objective, choice = Objective(runs_per_load=record.runs_per_load), _chosen(record)
    costs = {lane: [objective.cost_ms(one) for one in found[lane]] for lane in found if lane != DEFAULT}
    best = min(costs, key=lambda lane: paired_ratio(costs[lane], costs[choice]))
    recorded = record.trials[0].final or record.trials[0].figures
    logarithms = [math.log(own / other) for own, other in zip(costs[choice], costs[best], strict=True)]
    return ChoiceReport(
        runs_per_load=record.runs_per_load,
        trials=len(record.trials),
        share=len(record.trials) / grid,
        elapsed_s=record.elapsed_s,
        choice=space.describe(choice),
        best=space.describe(best),
        cost_ratio=paired_ratio(costs[choice], costs[best]),
        cost_error=standard_error(logarithms),
        init_ratio=_ratio(found, DEFAULT, choice, "init_ms"),
        first_result_ratio=_ratio(found, DEFAULT, choice, "first_result_ms"),
        steady_ratio=_ratio(found, choice, DEFAULT, "steady_ms"),
        default_agrees=recorded is not None and _agrees(recorded, found[DEFAULT]),
        figures={
            "default" if lane == DEFAULT else space.describe(lane): _summaries(found[lane], objective)
            for lane in found
        },
    )


def _ratio(found: Found, above: PlanChoice, below: PlanChoice, name: str) -> float:
    return paired_ratio(
        [getattr(one, name) for one in found[above]], [getattr(one, name) for one in found[below]]
    )


def _agrees(recorded: PlanFigures, measured: Sequence[ProbeResult]) -> bool:
    """Says whether the quartile ranges of first result and steady run overlap."""
    pairs = (
        (recorded.first_result_ms, Samples.of([one.first_result_ms for one in measured])),
        (recorded.steady_ms, Samples.of([one.steady_ms for one in measured])),
    )
    return all(left.p25 <= right.p75 and right.p25 <= left.p75 for left, right in pairs)


def _summaries(results: Sequence[ProbeResult], objective: Objective) -> dict[str, dict[str, float]]:
    figures = join_results("", results)
    of_plan = {name: getattr(figures, name) for name in ("ready_ms", "init_ms", "first_ms", "steady_ms")}
    of_plan["cost_ms"] = Samples.of(objective.cost_ms(one) for one in results)
    return {name: samples.statistics() for name, samples in of_plan.items()}


def build_table(reports: Sequence[ModelReport]) -> str:
    """Returns a row per model and number of runs."""
    lines = [
        f"{'model':<10} {'runs':>7} {'tried':>6} {'share':>6} {'s':>5} {'cost/best':>13} {'init':>7} "
        f"{'first':>6} {'steady':>6}  choice"
    ]
    for report in reports:
        for one in report.searches:
            lines.append(
                f"{report.model:<10} {one.runs_per_load:>7} {one.trials:>6} {one.share:>6.0%} "
                f"{one.elapsed_s:>5.0f} {one.cost_ratio:>5.3f} ± {one.cost_error:>5.3f} "
                f"{one.init_ratio:>6.1f}× {one.first_result_ratio:>5.1f}× {one.steady_ratio:>6.2f}  "
                f"{one.choice}"
            )
    return "\n".join(lines)


def missed_goals(reports: Sequence[ModelReport]) -> tuple[str, ...]:
    """Returns the goals that were not reached, one line each."""
    searches = [(report.model, one) for report in reports for one in report.searches]
    missed = [
        f"{model}, {one.runs_per_load}: cost {one.cost_ratio:.3f} ± {one.cost_error:.3f} of the best, "
        f"expected at most {GOAL_COST}"
        for model, one in searches
        if one.cost_ratio > GOAL_COST
    ]
    missed += [
        f"{model}, {one.runs_per_load}: {one.share:.0%} of the grid, expected at most {GOAL_SHARE:.0%}"
        for model, one in searches
        if one.share > GOAL_SHARE
    ]
    missed += [
        f"{model}, {one.runs_per_load}: the default's figures in the manifest do not agree"
        for model, one in searches
        if not one.default_agrees
    ]
    soon = [one for _, one in searches if one.runs_per_load == 1]
    if soon:
        goals = {"first_result": GOAL_FIRST, "init": GOAL_INIT}
        missed += [
            f"{name} {mean:.2f}× sooner, expected {goals[name]}×"
            for name, mean in mean_ratios(soon).items()
            if mean < goals[name]
        ]
    return tuple(missed)


def mean_ratios(searches: Sequence[ChoiceReport]) -> dict[str, float]:
    """Returns geometric means: how many times sooner the first result comes, and the session stands."""
    return {
        "first_result": geometric_mean(one.first_result_ratio for one in searches),
        "init": geometric_mean(one.init_ratio for one in searches),
    }


def build_json(reports: Sequence[ModelReport], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything that was measured, with the machine, as JSON types."""
    soon = [one for report in reports for one in report.searches if one.runs_per_load == 1]
    return {
        "question": "the search's choice against the best of an exhaustive grid, and against the default",
        "machine": dict(machine),
        "runs_per_load_1": mean_ratios(soon) if soon else {},
        "missed": list(missed_goals(reports)),
        "models": encode(tuple(reports)),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches, measures and reports; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SPECS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--runs", nargs="+", type=int, default=list(RUNS_PER_LOAD), metavar="N")
    parser.add_argument("--rounds", type=int, default=7, choices=range(3, 100), metavar="N")
    parser.add_argument("--budget-s", type=float, default=180.0, help="seconds per search")
    parser.add_argument("--steady-s", type=float, default=0.3, help="seconds of repeated runs per process")
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts/bench"))
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    options = parser.parse_args(arguments)
    reports: list[ModelReport] = []
    for model in options.models:
        try:
            bench = Bench(model, options.artifacts.absolute(), options)
            reports.append(measure_model(bench, options.runs))
        except PipelineError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        if options.out:  # after each model: a long run that is cut short is not lost
            text = format_results(build_json(reports, describe_machine()))
            options.out.write_text(text + "\n", encoding="utf-8")
    missed = missed_goals(reports)
    print(build_table(reports))
    print("\n".join(f"missed: {line}" for line in missed) or "every goal reached")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
