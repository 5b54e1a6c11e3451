"""Which plan is measured after which. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

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
