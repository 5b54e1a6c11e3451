"""What measured figures say: their spread, and which plan is faster beyond the noise. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median, quantiles

from pipeline.bundle.summary import Summary

AGREEMENT = 0.8
"""Share of rounds whose paired difference must have the same sign."""


LEAST_ROUNDS = 3
"""Fewer say nothing about a spread."""

_TINY = 1e-12


def summarise(values: Sequence[float]) -> Summary:
    """Returns the order statistics of `values`; quartiles interpolate between neighbours.

    Args:
        values: One figure per fresh process, at least one.

    Raises:
        ValueError: There are none.
    """
    if not values:
        raise ValueError("no values to summarise")
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Summary(middle, low, high, min(values), max(values), len(values))


def separated(below: Sequence[float], above: Sequence[float]) -> bool:
    """Says whether `below` is smaller than `above` beyond the noise.

    Two conditions, because each alone is fooled by what the other sees:

    - The quartile ranges do not overlap. This weighs the gap against the spread of single processes; but
      where the machine changed its speed half-way, both ranges are wide and it says nothing.
    - In at least 80 % of the rounds the figure is the smaller of its pair. Rounds are interleaved, so a pair
      saw the same machine; but a difference of a microsecond would do.

    Both tolerate an outlier: one process in five that another program disturbed turns nothing round. Of two
    equal plans one is called faster in 10 % of comparisons at 3 rounds, 8 % at 5, 3 % at 7 and 1 % at 9
    (100,000 random trials each). That is lenient on purpose: calling equal plans different costs nothing,
    since either would do, whereas calling a much faster one equal loses what the build is for.

    Args:
        below: Figures of one plan, in the order of rounds.
        above: Figures of the other plan, from the same rounds.

    Raises:
        ValueError: There are fewer than three rounds, or not as many of one as of the other.
    """
    if len(below) < LEAST_ROUNDS:
        raise ValueError(f"three rounds are the least that show a spread, got {len(below)}")
    pairs = list(zip(below, above, strict=True))
    agreeing = sum(low < high for low, high in pairs)
    return summarise(below).p75 < summarise(above).p25 and agreeing >= AGREEMENT * len(pairs)


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Returns the ratio of two medians, infinite where the lower one is zero."""
    below = median(denominator)
    return median(numerator) / below if below else float("inf")


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Returns how many times larger one plan's figure is than another's, estimated from pairs.

    The Hodges-Lehmann estimate of the logarithm: the median of the means of all pairs of rounds. A machine
    that changes its speed changes both figures of a round, so the ratio stands.

    Args:
        numerator: Figures of one plan, in the order of rounds; what is zero counts as next to nothing.
        denominator: Figures of the other plan, from the same rounds, at least one.

    Raises:
        ValueError: There are none, or not as many of one as of the other.
    """
    pairs = zip(numerator, denominator, strict=True)
    return math.exp(centre([math.log(max(above, _TINY) / max(below, _TINY)) for above, below in pairs]))


def centre(values: Sequence[float]) -> float:
    """Returns the Hodges-Lehmann centre: near the mean's precision, and few outliers do not move it.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("no values to find the centre of")
    return median([(one + other) / 2 for one, other in itertools.combinations_with_replacement(values, 2)])
