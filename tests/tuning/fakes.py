"""Machines with known costs of every plan.

A table is made of what was seen on real models: every value of a knob multiplies the time to the first
result, the time of a run and the memory by a factor, and some pairs of values by another. Measuring adds
noise that the seed, the plan and the process's number decide, and moves the clock by what the process takes.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ortprep.children.probe import ProbeResult
from ortprep.errors import ChildError
from ortprep.tuning.objective import Objective, PlanSearchResult
from ortprep.tuning.search import SearchEffects, search
from ortprep.tuning.space import DEFAULT, PlanChoice, Space

Factors = Mapping[tuple[str, ...], tuple[float, float, float]]
"""First result, run and memory, by `knob=value` or several of them that come together."""


@dataclass(frozen=True)
class Table:
    """What plans truly cost.

    Attributes:
        base: Figures of the base.
        factors: What values do to it.
        others: Figures of the default, relative to the base: first result and run.
    """

    base: ProbeResult
    factors: Factors
    others: Mapping[PlanChoice, tuple[float, float]]

    def figures(self, choice: PlanChoice) -> ProbeResult:
        """Returns the true figures of a plan."""
        if choice in self.others:
            first, steady = self.others[choice]
            return _scaled(self.base, first, steady, 1.5)
        values = {f"{knob}={value}" for knob, value in choice.values}
        found = [factors for wanted, factors in self.factors.items() if values.issuperset(wanted)]
        return _scaled(
            self.base, *(math.prod(column) for column in zip((1.0, 1.0, 1.0), *found, strict=True))
        )


def _scaled(base: ProbeResult, first: float, steady: float, memory: float) -> ProbeResult:
    return dataclasses.replace(
        base,
        ready_ms=base.ready_ms * first,
        init_ms=base.init_ms * first,
        first_ms=base.first_ms * first,
        steady_ms=base.steady_ms * steady,
        private_mb=base.private_mb * memory,
        peak_mb=base.peak_mb * memory,
    )


COMMON: Factors = {
    ("threads=4",): (0.97, 1.03, 1.0),
    ("threads=2",): (1.0, 1.55, 0.98),
    ("threads=1",): (1.05, 2.7, 0.97),
    ("spinning=off",): (1.02, 1.1, 1.0),
    ("memory_arena=off",): (0.97, 1.2, 0.9),
    ("memory_pattern=off",): (0.99, 1.02, 0.99),
    ("device_allocator=on",): (0.98, 1.0, 0.93),
}

TRANSFORMER_TABLE = Table(
    base=ProbeResult(
        ready_ms=304.0, init_ms=240.0, first_ms=64.0, steady_ms=22.0, private_mb=620.0, peak_mb=900.0
    ),
    factors={
        **COMMON,
        ("form=ort",): (1.1, 1.0, 1.05),
        ("form=prepacked",): (0.45, 1.0, 0.5),
        ("prepacking=off",): (0.28, 1.41, 0.4),
        ("prepacking=parallel",): (0.62, 1.0, 1.0),
        # What is arranged already is not arranged in parallel.
        ("form=prepacked", "prepacking=parallel"): (1.6, 1.0, 1.0),
        ("form=ort", "prepacking=off"): (0.8, 1.0, 0.9),
        ("memory_arena=off", "device_allocator=on"): (1.03, 1.05, 1.0),
    },
    others={DEFAULT: (2.05, 1.0)},
)
"""Prepacking costs most of a load and saves a third of a run; pairs matter for a soon first result."""

CONVOLUTION_TABLE = Table(
    base=ProbeResult(
        ready_ms=48.0, init_ms=28.0, first_ms=20.0, steady_ms=18.0, private_mb=190.0, peak_mb=310.0
    ),
    factors={
        **COMMON,
        ("form=ort",): (0.86, 1.0, 1.05),
        ("form=prepacked",): (1.02, 1.0, 1.0),
        ("prepacking=off",): (0.95, 1.15, 0.8),
        ("prepacking=parallel",): (0.99, 1.0, 1.0),
        # A spinning pool is worth little where one operator follows another at once.
        ("spinning=off",): (0.9, 1.01, 1.0),
        ("spinning=off", "threads=4"): (0.97, 0.94, 1.0),
        ("memory_arena=off", "memory_pattern=off"): (0.97, 0.9, 1.0),
    },
    others={DEFAULT: (4.8, 1.02)},
)
"""The layout is in the graph, so prepacking matters little; what pays comes of pairs."""


TABLES = {"transformer": TRANSFORMER_TABLE, "convolutions": CONVOLUTION_TABLE}


@dataclass
class Machine:
    """Measures plans of a table; a fake of `SearchEffects` that has its own clock.

    Attributes:
        table: What is true.
        space: The plans there are.
        seed: Of noise.
        noise: Distance between the quartiles of a figure, relative to its median.
        start_s: What a process takes beside the session.
        fails: Why a plan's n-th process fails; None if it does not.
        now_s: The clock.
        measured: Processes by plan.
        explored: The same when the last comparison began.
        failed: Plans of which a process failed.
        said: Its lines.
    """

    table: Table
    space: Space
    seed: int = 0
    noise: float = 0.03
    start_s: float = 0.4
    fails: Callable[[PlanChoice, int], str | None] = lambda choice, number: None
    now_s: float = 0.0
    measured: Counter[PlanChoice] = field(default_factory=Counter)
    explored: Counter[PlanChoice] = field(default_factory=Counter)
    failed: set[PlanChoice] = field(default_factory=set)
    said: list[str] = field(default_factory=list)

    def measure(self, choice: PlanChoice, deadline_s: float) -> ProbeResult:
        number = self.measured[choice]
        self.measured[choice] += 1
        true = self.table.figures(choice)
        self.now_s += self.process_s(true)
        if (failure := self.fails(choice, number)) is not None:
            self.failed.add(choice)
            raise ChildError(failure)
        chance, sigma = random.Random(f"{self.seed} {choice} {number}"), self.noise / 1.349
        init_ms = true.init_ms * math.exp(chance.gauss(0, sigma))
        first_ms = true.first_ms * math.exp(chance.gauss(0, sigma))
        return dataclasses.replace(
            true,
            ready_ms=init_ms + first_ms,
            init_ms=init_ms,
            first_ms=first_ms,
            steady_ms=true.steady_ms * math.exp(chance.gauss(0, sigma)),
        )

    def process_s(self, figures: ProbeResult) -> float:
        return self.start_s + (figures.ready_ms + 20 * figures.steady_ms) / 1e3

    def say(self, line: str) -> None:
        self.said.append(line)
        if line.endswith("again"):
            self.explored = Counter(self.measured)

    def effects(self) -> SearchEffects:
        return SearchEffects(measure=self.measure, clock=lambda: self.now_s, say=self.say)

    def search(self, objective: Objective, limits: Limits) -> PlanSearchResult:
        return search(self.space, Objective.of(objective, **limits), self.effects())


def true_cost(table: Table, choice: PlanChoice, objective: Objective) -> float:
    return objective.cost_ms(table.figures(choice))


Limits = Mapping[str, float]


def limits(budget_s: float, max_trials: int = 5000) -> Limits:
    """Returns limits of a search, beyond what a spec may ask for too."""
    return {"budget_s": budget_s, "max_trials": max_trials}
