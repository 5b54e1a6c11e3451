"""Rounds of measurements: which plan after which, and what became of each; no clock in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.bundle.manifest import PlanFigures
from pipeline.errors import PipelineError
from pipeline.measuring.comparison import summarise
from pipeline.runtime.probe import ProbeResult

P = TypeVar("P")


def order_of_round(plans: Sequence[P], index: int) -> tuple[P, ...]:
    """Returns the order of the plans in one round, so that none always follows the same other one.

    A plan may leave the machine in a state that helps or hinders the next (caches, clock speed, memory to be
    given back). The orders are those of a Williams design, a Latin square whose rows hold every pair of
    neighbours equally often: over as many rounds as there are plans, or twice as many if they are odd in
    number.

    Args:
        plans: At least one.
        index: Number of the round, from 0.
    """
    count = len(plans)
    zigzag = [(step + 1) // 2 if step % 2 else (count - step // 2) % count for step in range(count)]
    order = tuple(plans[(position + index) % count] for position in zigzag)
    is_mirrored = count % 2 == 1 and index // count % 2 == 1
    return order[::-1] if is_mirrored else order


@dataclass(frozen=True)
class Outcome:
    """What a number of rounds gave.

    Attributes:
        results: Per plan that answered in every round, one result a round.
        failures: Per plan that did not, its first failure.
    """

    results: Mapping[str, tuple[ProbeResult, ...]]
    failures: Mapping[str, str]


def run_rounds(
    plans: Sequence[str], *, rounds: int, measure: Callable[[str], ProbeResult], first: int = 0
) -> Outcome:
    """Measures every plan once a round; one that fails is not tried again, and none of its figures count.

    Args:
        plans: Names.
        rounds: How many.
        measure: Measures a plan in a fresh process; a `PipelineError` of it is that plan's failure.
        first: Number of the first round, where others went before: their orders go on from there.
    """
    results: dict[str, list[ProbeResult]] = {plan: [] for plan in plans}
    failures: dict[str, str] = {}
    for index in range(first, first + rounds):
        for plan in order_of_round(plans, index):
            if plan in failures:
                continue
            try:
                results[plan].append(measure(plan))
            except PipelineError as error:
                failures[plan] = error.message
    return Outcome({p: tuple(r) for p, r in results.items() if p not in failures}, failures)


def join_outcomes(earlier: Outcome, later: Outcome) -> Outcome:
    """Returns what both gave together; a plan that failed in either has failed."""
    failures = {**later.failures, **earlier.failures}
    results = {
        plan: of_plan + later.results[plan]
        for plan, of_plan in earlier.results.items()
        if plan not in failures
    }
    return Outcome(results, failures)


def figures_of(plan: str, results: Sequence[ProbeResult]) -> PlanFigures:
    """Returns the order statistics of one plan's results; GPU memory only if every process reported it."""
    gpu_mb = [result.gpu_mb for result in results if result.gpu_mb is not None]
    return PlanFigures(
        plan=plan,
        ready_ms=summarise([result.ready_ms for result in results]),
        import_ms=summarise([result.import_ms for result in results]),
        init_ms=summarise([result.init_ms for result in results]),
        first_ms=summarise([result.first_ms for result in results]),
        first_result_ms=summarise([result.init_ms + result.first_ms for result in results]),
        steady_ms=summarise([result.steady_ms for result in results]),
        private_mb=summarise([result.private_mb for result in results]),
        peak_mb=summarise([result.peak_mb for result in results]),
        gpu_mb=summarise(gpu_mb) if len(gpu_mb) == len(results) else None,
    )
