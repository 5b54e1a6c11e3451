"""Numbers that pools are given, checked."""

from __future__ import annotations

import math
import numbers

from pipeline.errors import PoolError


def require_counts(*, least: int = 1, **values: int | None) -> None:
    """Raises unless all are whole numbers, or None.

    Args:
        least: The least that they may be.
        values: By the arguments' names.

    Raises:
        PoolError: One is none, or less.
    """
    for name, value in values.items():
        given: object = value
        if value is not None and not (isinstance(given, numbers.Integral) and value >= least):
            raise PoolError(f"bad {name}\n  expected a whole number from {least}, got {value!r}")


def require_positive(*, or_zero: bool = False, **values: float | None) -> None:
    """Raises unless all are numbers above 0, or None.

    Args:
        or_zero: Whether 0 will do.
        values: By the arguments' names; infinity is a number.

    Raises:
        PoolError: One is none, or too small.
    """
    for name, value in values.items():
        given: object = value
        if value is None or (or_zero and value == 0):
            continue
        if not (isinstance(given, numbers.Real) and 0 < value <= math.inf):
            at_least = "0 or more" if or_zero else "above 0"
            raise PoolError(f"bad {name}\n  expected a number {at_least}, got {value!r}")
