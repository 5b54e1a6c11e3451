"""The ladder of precisions: what to try next if the gate fails. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ortprep.stages.core.contract import SOURCE_PRECISION

_NARROWEST_FIRST = ("int4", "int8", "bf16", "fp16", "mixed", SOURCE_PRECISION)

SEARCHED = ("mixed", "int8", "int4")
"""Precisions that may leave nodes in fp32, as few as possible, to pass the gate."""


def plan_steps(requested: str, ladder: Sequence[str]) -> tuple[str, ...]:
    """Returns the precisions to try, in order: the requested one, then the rest of the ladder.

    Args:
        requested: A precision.
        ladder: The spec's; of one that names the precision, only what comes after it, of another, only what
            is wider.
    """
    if requested in ladder:
        return (requested, *ladder[ladder.index(requested) + 1 :])
    rank = {precision: position for position, precision in enumerate(_NARROWEST_FIRST)}
    return (requested, *(step for step in ladder if rank[step] > rank[requested]))


def why_not_needed(step: str, requested: Sequence[str]) -> str | None:
    """Returns why a step of the ladder makes no variant; None if it makes one."""
    if step == SOURCE_PRECISION:
        return "it steps down to fp32, which the bundle already has"
    if step in requested:
        return f"it steps down to {step}, which the spec requests separately"
    return None
