"""Comparisons whose candidates take turns in rounds, and how many rounds there is time for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeline.diagnose.diagnosis import Finding
from pipeline.errors import PipelineError
from pipeline.measuring.comparison import LEAST_ROUNDS
from pipeline.measuring.rounds import order_of_round

CHILD_TIMEOUT_S = 24 * 3600.0
"""A process that takes longer hangs. Models that take an hour to load are what the doctor is for, and some
checks make several sessions one after another."""

MOST_S = 1800.0
"""Seconds that the least rounds of a comparison may take together; beyond, they are cut."""

K = TypeVar("K", bound=str)
T = TypeVar("T")


@dataclass(frozen=True)
class Turns(Generic[K, T]):
    """What a comparison gave.

    Attributes:
        rounds: Per candidate that was measured in every round, what each round gave; empty if there was none.
        failures: Per candidate that failed, why.
        round_s: What a round took, or by estimate takes where none was begun.
    """

    rounds: Mapping[K, tuple[T, ...]]
    failures: Mapping[K, str]
    round_s: float


def take_turns(
    candidates: Sequence[K],
    measure: Callable[[K], T],
    *,
    estimate_s: float,
    most: int = LEAST_ROUNDS,
    enough_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Turns[K, T]:
    """Measures every candidate once a round; one that fails is not tried again, and none of it counts.

    Args:
        candidates: Names.
        measure: Measures one; a `PipelineError` of it is that candidate's failure.
        estimate_s: What a round takes at most, by what is known beforehand.
        most: Rounds at most.
        enough_s: After so long no round begins beyond the least that show a spread.
        clock: Seconds, from any beginning.
    """
    rounds: dict[K, list[T]] = {candidate: [] for candidate in candidates}
    failures: dict[K, str] = {}
    begun_s, round_s = clock(), estimate_s
    for index in range(most):
        if not is_affordable(index, round_s, enough_s=enough_s):
            break
        for candidate in order_of_round(candidates, index):
            if candidate in failures:
                continue
            try:
                rounds[candidate].append(measure(candidate))
            except PipelineError as error:
                failures[candidate] = error.message
        round_s = (clock() - begun_s) / (index + 1)
    complete = {each: tuple(of_each) for each, of_each in rounds.items() if of_each and each not in failures}
    return Turns(complete, failures, round_s)


def is_affordable(done: int, round_s: float, *, enough_s: float = math.inf) -> bool:
    """Says whether another round is to begin. Pure.

    The first may take as long as all of the least rounds may take together: where it turns out to take that,
    its figures are all there will be.

    Args:
        done: Rounds before it.
        round_s: What each of them took, or if there are none, by estimate takes at most.
        enough_s: See `take_turns`.
    """
    if done >= LEAST_ROUNDS:
        return done * round_s <= enough_s
    return round_s * (LEAST_ROUNDS if done else 1) <= MOST_S


def explain_cut(done: int, round_s: float) -> Finding:
    """Returns what to say where there were too few rounds to compare anything. Pure.

    Args:
        done: Rounds, fewer than `LEAST_ROUNDS`.
        round_s: See `Turns`.
    """
    minutes = f"{round_s / 60:.0f} minutes"
    text = f"a round would take up to {minutes}, so nothing was compared"
    if done:
        text = (
            f"a round takes {minutes}, so there was {done} in place of {LEAST_ROUNDS}: too few to tell a "
            "difference from noise"
        )
    return Finding("rounds-cut", "note", text, "compare a smaller model of the same kind")
