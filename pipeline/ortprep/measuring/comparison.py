"""Spread of measured figures, and which plan is faster beyond the noise. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median, quantiles
from typing import TypeVar

from ortprep.bundle.tuning_record import Summary

AGREEMENT = 0.8
"""Share of rounds whose paired difference must have the same sign."""


MIN_ROUNDS = 3
"""Fewer say nothing about a spread."""

FROM_MAD = 1.4826
"""Of a normal distribution: standard deviation by median absolute deviation."""

PRECISION = 1.05
"""Standard error of a Hodges-Lehmann centre, relative to a mean's."""

_TINY = 1e-12

T = TypeVar("T")


def summarise(values: Sequence[float]) -> Summary:
    """Returns the order statistics of `values`; quartiles interpolate between neighbours.

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("no values to summarise")
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Summary(middle, low, high, min(values), max(values), len(values))


def separated(below: Sequence[float], above: Sequence[float]) -> bool:
    """Says whether `below` is smaller than `above` beyond the noise; both in the order of the same rounds.

    Two conditions, because each alone can be fooled:

    - The quartile ranges do not overlap. This weighs the gap against the spread of single processes, but says
      nothing if the machine changed its speed half-way.
    - In at least 80 % of the rounds the figure is the smaller of its pair. A pair saw the same machine, but a
      difference of a microsecond would do.

    Both tolerate an outlier of one process in five. Of two equal plans one is called faster in 10 % of
    comparisons at 3 rounds, 8 % at 5, 3 % at 7 and 1 % at 9 (100,000 random trials each). That is lenient on
    purpose: calling equal plans different costs nothing, whereas calling a much faster one equal loses the
    gain.

    Raises:
        ValueError: There are fewer than three rounds, or the numbers of rounds differ.
    """
    if len(below) < MIN_ROUNDS:
        raise ValueError(f"a spread needs at least three rounds, got {len(below)}")
    pairs = list(zip(below, above, strict=True))
    agreeing = sum(low < high for low, high in pairs)
    return summarise(below).p75 < summarise(above).p25 and agreeing >= AGREEMENT * len(pairs)


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Returns the ratio of two medians, infinite where the lower one is zero."""
    below = median(denominator)
    return median(numerator) / below if below else float("inf")


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
    pairs = zip(numerator, denominator, strict=True)
    return [math.log(max(above, _TINY) / max(below, _TINY)) for above, below in pairs]


def standard_error(logarithms: Sequence[float]) -> float:
    """Returns the standard error of the centre of paired ratios' logarithms, by their median deviation."""
    rounds = len(logarithms)
    if rounds < 2:
        return math.inf
    middle = median(logarithms)
    deviation = median([abs(value - middle) for value in logarithms])
    return FROM_MAD * deviation * math.sqrt(rounds / (rounds - 1)) * PRECISION / math.sqrt(rounds)


def is_below(below: Sequence[float], above: Sequence[float]) -> bool:
    """Says whether `below` is smaller than `above` beyond the noise, by pairs of the same round alone.

    The centre of the ratios is two standard errors below 1, and 80 % of the rounds agree. It works where the
    machine changed its speed between rounds, unlike `separated`. Of two equal plans it calls one smaller in 9
    % of comparisons at 3 rounds, 8 % at 5, 5 % at 7 and 2 % at 12 (20,000 random trials each).

    Raises:
        ValueError: There are fewer than three rounds, or the numbers of rounds differ.
    """
    if len(below) < MIN_ROUNDS:
        raise ValueError(f"a spread needs at least three rounds, got {len(below)}")
    logarithms = _log_ratios(below, above)
    agreeing = sum(log < 0 for log in logarithms)
    return agreeing >= AGREEMENT * len(logarithms) and centre(logarithms) < -2 * standard_error(logarithms)


def beats(below: Sequence[float], above: Sequence[float], *, least: float) -> bool:
    """Says whether `below` is smaller than `above` beyond the noise, by both tests and by a share of `least`.

    Fewer than three rounds say nothing. Of two equal plans the first is called smaller in 7 % of comparisons
    at 3 rounds, 5 % at 5, 2 % at 7 and 1 % at 9 with `least` 0; with 0.05 in 0.1 % or less where single
    figures scatter by 2 %, and in 5 %, 3 %, 1 % and 1 % where they scatter by 5 % (20,000 random trials
    each).

    Raises:
        ValueError: The numbers of rounds differ.
    """
    if len(below) < MIN_ROUNDS:
        return False
    noticed = separated(below, above) and is_below(below, above)
    return noticed and paired_ratio(above, below) >= 1 + least


def centre(values: Sequence[float]) -> float:
    """Returns the Hodges-Lehmann centre: near the mean's precision, and few outliers do not move it.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("no values to find the centre of")
    return median([(one + other) / 2 for one, other in itertools.combinations_with_replacement(values, 2)])


def pareto_front(points: Iterable[T], read: Callable[[T], tuple[float, float, int]]) -> tuple[T, ...]:
    """Returns the points that no other beats in both figures, smallest first figure first.

    Args:
        points: Candidates.
        read: Reads both figures, less being better, and a number that orders equal points.
    """
    front: list[T] = []
    for point in sorted(points, key=read):
        if not front or read(point)[1] < read(front[-1])[1]:
            front.append(point)
    return tuple(front)
