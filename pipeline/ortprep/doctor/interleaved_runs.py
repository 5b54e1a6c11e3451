"""What comparisons of threads with processes share: the limit of their time, and what became of each way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median

from ortprep.doctor.diagnosis import Finding
from ortprep.measuring.change import format_value
from ortprep.measuring.comparison import MIN_ROUNDS
from ortprep.measuring.rounds import InterleavedRuns, K, T

MAX_COMPARISON_S = 1800.0
"""Seconds that the first `MIN_ROUNDS` rounds may take together; a longer comparison is cut."""

PHRASES: Mapping[str, str] = {
    "alone": "each alone",
    "sequential": "one after another",
    "threads": "in threads of one process",
    "processes": "in a process each",
}


def explain_failures(
    runs: InterleavedRuns[K, T], subject: str, *, tolerated: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """Yields a problem for every way that failed, and whether rounds were cut.

    Args:
        runs: Results of the comparison.
        subject: What was to run.
        tolerated: Ways whose failure is a note, each with the reason.
    """
    for way, reason in runs.failures.items():
        text = f"{subject} {PHRASES[way]} failed: {reason}"
        if tolerated and way in tolerated:
            yield Finding("way-failed", "note", f"{text}; {tolerated[way]}")
        else:
            yield Finding("way-failed", "problem", text, "fewer at once")
    if runs.completed < MIN_ROUNDS and (runs.completed or not runs.failures):
        text = (
            f"a round takes up to {runs.round_s / 60:.0f} minutes, so there were {runs.completed} instead "
            f"of {MIN_ROUNDS}: too few to tell a difference from noise"
        )
        yield Finding("rounds-cut", "note", text, "compare a smaller model of the same kind")


def phrase_medians(figures: Mapping[K, list[float]]) -> str:
    """Returns the median of every way in words."""
    return ", ".join(f"{format_value(median(values))} ms {PHRASES[way]}" for way, values in figures.items())


def read_rounds(runs: InterleavedRuns[K, T], read: Callable[[T], float]) -> dict[K, list[float]]:
    """Returns a figure of every way that was measured, round by round."""
    return {way: [read(result) for result in results] for way, results in runs.rounds.items()}
