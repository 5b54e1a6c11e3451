"""Interleaved rounds, the spread of what they measure, and which plan is faster beyond the noise."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

from ortprep.bundle.figures import Samples
from ortprep.errors import PipelineError

AGREEMENT = 0.8
"""Share of rounds whose paired difference must have the same sign."""


MIN_ROUNDS = 3
"""Fewer say nothing about a spread."""

_FROM_MAD = 1.4826
"""Of a normal distribution: standard deviation by median absolute deviation."""

_PRECISION = 1.05
"""Standard error of a Hodges-Lehmann centre, relative to a mean's."""

_TINY = 1e-12

C = TypeVar("C")
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def is_apart(below: Samples, above: Samples) -> bool:
    """Says whether one figure is smaller than another beyond the noise, of runs without common rounds.

    The quartile ranges do not overlap; with two processes only, the whole ranges do not. A single process
    says nothing.

    Of two equal plans one is called more than 10 % slower than the other in 1.9 % of comparisons at 3 rounds,
    0.4 % at 5 and 0.1 % at 7 (by ranges, 2.5 % at 2) where single processes scatter by 5 %, and in 11, 5 and
    2 % (12 % at 2) where they scatter by 10 % (20,000 random trials each).
    """
    rounds = min(below.count, above.count)
    if rounds < MIN_ROUNDS:
        return rounds > 1 and below.maximum < above.minimum
    return below.p75 < above.p25


def is_below(below: Sequence[float], above: Sequence[float], *, min_gain: float = 0.0) -> bool:
    """Says whether `below` is smaller than `above` beyond the noise, by pairs of the same rounds.

    The centre of the ratios is two standard errors below 1, the gain is a share of `min_gain` at least, and
    80 % of the rounds agree. Both plans of a pair saw the same machine, so one that changes its speed between
    rounds decides nothing. Fewer than three rounds say nothing. Of two equal plans it calls one smaller in
    9 % of comparisons at 3 rounds, 8 % at 5, 5 % at 7 and 2 % at 12 (20,000 random trials each).

    Raises:
        ValueError: The numbers of rounds differ.
    """
    if min(len(below), len(above)) < MIN_ROUNDS:
        return False
    logarithms = _log_ratios(below, above)
    agreeing, middle = sum(log < 0 for log in logarithms), centre(logarithms)
    is_sure = agreeing >= AGREEMENT * len(logarithms) and middle < -2 * standard_error(logarithms)
    return is_sure and math.exp(-middle) >= 1 + min_gain


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Returns how many times larger one plan's figure is than another's, estimated from pairs.

    This is the Hodges-Lehmann estimate of the logarithm: the median of the means of all pairs of rounds. A
    machine that changes its speed changes both figures of a round. Zero counts as next to nothing.

    Raises:
        ValueError: There are no rounds, or the numbers of rounds differ.
    """
    return math.exp(centre(_log_ratios(numerator, denominator)))


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], *, errors: float
) -> tuple[float, float]:
    """Returns what `paired_ratio` estimates, less and plus some standard errors; 0 and infinity of one round.

    Raises:
        ValueError: There are no rounds, or the numbers of rounds differ.
    """
    logarithms = _log_ratios(numerator, denominator)
    middle, margin = centre(logarithms), errors * standard_error(logarithms)
    return math.exp(middle - margin), math.exp(middle + margin)


def _log_ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Returns the logarithm of the ratio of each round; zero counts as next to nothing."""
    pairs = zip(numerator, denominator, strict=True)
    return [math.log(max(above, _TINY) / max(below, _TINY)) for above, below in pairs]


def standard_error(logarithms: Sequence[float]) -> float:
    """Returns the standard error of the centre of paired ratios' logarithms, by their median deviation."""
    rounds = len(logarithms)
    if rounds < 2:
        return math.inf
    middle = median(logarithms)
    deviation = median([abs(value - middle) for value in logarithms])
    return _FROM_MAD * deviation * math.sqrt(rounds / (rounds - 1)) * _PRECISION / math.sqrt(rounds)


def centre(values: Sequence[float]) -> float:
    """Returns the Hodges-Lehmann centre: near the mean's precision, and few outliers do not move it.

    Raises:
        ValueError: There are no values.
    """
    return median([(one + other) / 2 for one, other in itertools.combinations_with_replacement(values, 2)])


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
    """

    rounds: Mapping[K, tuple[T, ...]]
    failures: Mapping[K, str]

    def followed_by(self, later: InterleavedRuns[K, T]) -> InterleavedRuns[K, T]:
        """Returns both runs as one; a candidate that failed in either has failed."""
        failures = {**later.failures, **self.failures}
        rounds = {
            candidate: results + later.rounds[candidate]
            for candidate, results in self.rounds.items()
            if candidate not in failures
        }
        return InterleavedRuns(rounds, failures)


def run_interleaved(
    candidates: Sequence[K],
    measure: Callable[[K], T],
    *,
    max_rounds: int = MIN_ROUNDS,
    first: int = 0,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> InterleavedRuns[K, T]:
    """Measures every candidate once a round; drops a candidate that fails, with all its results.

    Args:
        candidates: Names of the candidates.
        measure: Measures one candidate; a `PipelineError` is that candidate's failure.
        max_rounds: Maximum number of rounds.
        first: Number of the first round; the order continues that of earlier rounds.
        budget_s: Seconds after which no round is started beyond the `MIN_ROUNDS` that show a spread.
        clock: Seconds since any fixed instant.
    """
    rounds: dict[K, list[T]] = {candidate: [] for candidate in candidates}
    failures: dict[K, str] = {}
    end_s = clock() + budget_s
    for index in range(max_rounds):
        if index >= MIN_ROUNDS and clock() > end_s:
            break
        for candidate in order_of_round(candidates, first + index):
            if candidate in failures:
                continue
            try:
                rounds[candidate].append(measure(candidate))
            except PipelineError as error:
                failures[candidate] = error.message
    complete = {each: tuple(of_each) for each, of_each in rounds.items() if of_each and each not in failures}
    return InterleavedRuns(complete, failures)
