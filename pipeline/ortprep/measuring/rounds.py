"""Interleaved rounds: which candidate is measured after which, and what became of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ortprep.errors import PipelineError
from ortprep.measuring.comparison import MIN_ROUNDS

C = TypeVar("C")
K = TypeVar("K", bound=str)
T = TypeVar("T")


def order_of_round(candidates: Sequence[C], index: int) -> tuple[C, ...]:
    """Returns the order of the candidates in one round, so that none always follows the same other one.

    A candidate may leave the machine in a state that helps or hinders the next (caches, clock speed, memory
    to be given back). The orders are those of a Williams design, a Latin square whose rows hold every pair of
    neighbours equally often: over as many rounds as there are candidates, or twice as many if they are odd in
    number.
    """
    count = len(candidates)
    zigzag = [(step + 1) // 2 if step % 2 else (count - step // 2) % count for step in range(count)]
    order = tuple(candidates[(position + index) % count] for position in zigzag)
    is_mirrored = count % 2 == 1 and index // count % 2 == 1
    return order[::-1] if is_mirrored else order


@dataclass(frozen=True)
class InterleavedRuns(Generic[K, T]):
    """Results of a comparison.

    Attributes:
        rounds: Per candidate that was measured in every round, the result of each round.
        round_s: Mean time of a round, in seconds; the estimate if no round was started.
    """

    rounds: Mapping[K, tuple[T, ...]]
    failures: Mapping[K, str]
    round_s: float

    @property
    def completed(self) -> int:
        """Number of rounds that every remaining candidate completed."""
        return min((len(results) for results in self.rounds.values()), default=0)

    def followed_by(self, later: InterleavedRuns[K, T]) -> InterleavedRuns[K, T]:
        """Returns both runs as one; a candidate that failed in either has failed."""
        failures = {**later.failures, **self.failures}
        rounds = {
            candidate: results + later.rounds[candidate]
            for candidate, results in self.rounds.items()
            if candidate not in failures
        }
        return InterleavedRuns(rounds, failures, max(self.round_s, later.round_s))


def run_interleaved(
    candidates: Sequence[K],
    measure: Callable[[K], T],
    *,
    max_rounds: int = MIN_ROUNDS,
    first: int = 0,
    estimate_s: float = 0.0,
    max_comparison_s: float = math.inf,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> InterleavedRuns[K, T]:
    """Measures every candidate once a round; drops a candidate that fails, with all its results.

    Args:
        candidates: Names of the candidates.
        measure: Measures one candidate; a `PipelineError` is that candidate's failure.
        max_rounds: Maximum number of rounds.
        first: Number of the first round; the order continues that of earlier rounds.
        estimate_s: Upper estimate of the time of a round, in seconds.
        max_comparison_s: Seconds that the first `MIN_ROUNDS` rounds may take together.
        budget_s: Seconds after which no round is started beyond the `MIN_ROUNDS` that show a spread.
        clock: Seconds since any fixed instant.
    """
    rounds: dict[K, list[T]] = {candidate: [] for candidate in candidates}
    failures: dict[K, str] = {}
    started_s, round_s = clock(), estimate_s
    for index in range(max_rounds):
        if not is_affordable(index, round_s, max_comparison_s=max_comparison_s, budget_s=budget_s):
            break
        for candidate in order_of_round(candidates, first + index):
            if candidate in failures:
                continue
            try:
                rounds[candidate].append(measure(candidate))
            except PipelineError as error:
                failures[candidate] = error.message
        round_s = (clock() - started_s) / (index + 1)
    complete = {each: tuple(of_each) for each, of_each in rounds.items() if of_each and each not in failures}
    return InterleavedRuns(complete, failures, round_s)


def is_affordable(done: int, round_s: float, *, max_comparison_s: float, budget_s: float) -> bool:
    """Says whether another round may start. Pure.

    The first round may take as long as all the required rounds together: if it does, it stays the only one.

    Args:
        done: Number of rounds before it.
        round_s: Mean time of those rounds, in seconds; the estimate if there are none.
        max_comparison_s: Limit of the required rounds, as in `run_interleaved`.
        budget_s: Limit of further rounds, as in `run_interleaved`.
    """
    if done >= MIN_ROUNDS:
        return done * round_s <= budget_s
    return round_s * (MIN_ROUNDS if done else 1) <= max_comparison_s
