"""The limit of a comparison in interleaved rounds, and the finding where it cut one."""

from __future__ import annotations

from ortprep.diagnose.diagnosis import Finding
from ortprep.measuring.comparison import MIN_ROUNDS
from ortprep.measuring.rounds import InterleavedRuns, K, T

MAX_COMPARISON_S = 1800.0
"""Seconds that the first `MIN_ROUNDS` rounds may take together; a longer comparison is cut."""


def explain_cut(runs: InterleavedRuns[K, T]) -> Finding:
    """Returns the finding for fewer than `MIN_ROUNDS` rounds, which compare nothing. Pure."""
    minutes = f"{runs.round_s / 60:.0f} minutes"
    text = f"a round would take up to {minutes}, so nothing was compared"
    if runs.completed:
        text = (
            f"a round takes {minutes}, so there was {runs.completed} in place of {MIN_ROUNDS}: too few to "
            "tell a difference from noise"
        )
    return Finding("rounds-cut", "note", text, "compare a smaller model of the same kind")
