"""Do two arrays rank the same element of a row first? Rows come in blocks, long ones in parts."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

_Floats: TypeAlias = NDArray[np.float64]


class _Ranks(NamedTuple):
    """Of every row: the reference's largest, the candidate's, and what the reference has where that is."""

    largest: _Floats
    highest: _Floats
    chosen: _Floats


class Ranking:
    """Counts rows, and those whose first in the candidate is a largest of the reference.

    Of equal elements the candidate ranks the first one first; NaN counts as the smallest.

    Attributes:
        rows: How many were ranked.
        agreed: How many of them agree.
    """

    def __init__(self, row: int) -> None:
        """Begins with no rows.

        Args:
            row: Elements of a row.
        """
        self._row = row
        self._begun: _Ranks | None = None
        self.rows = self.agreed = 0

    def add(self, expected: _Floats, got: _Floats, *, ends_row: bool) -> None:
        """Adds a block: one or more whole rows, or the next part of one that is longer.

        Args:
            expected: The reference's elements, one-dimensional.
            got: The candidate's.
            ends_row: Whether the last of them ends its row.
        """
        width = min(self._row, len(expected))
        ranks = _rank(expected.reshape(-1, width), got.reshape(-1, width))
        if self._begun is not None:
            ranks = _join(self._begun, ranks)
        self._begun = None if ends_row else ranks
        if ends_row:
            self.rows += len(ranks.largest)
            self.agreed += int(np.count_nonzero(ranks.chosen == ranks.largest))


def _rank(expected: _Floats, got: _Floats) -> _Ranks:
    left, right = (np.where(np.isnan(values), -np.inf, values) for values in (expected, got))
    first = right.argmax(axis=1)[:, None]
    highest, chosen = (np.take_along_axis(values, first, axis=1)[:, 0] for values in (right, left))
    return _Ranks(left.max(axis=1), highest, chosen)


def _join(before: _Ranks, after: _Ranks) -> _Ranks:
    """Returns the ranks of rows of which two parts were ranked."""
    chosen = np.where(after.highest > before.highest, after.chosen, before.chosen)
    largest, highest = (np.maximum(x, y) for x, y in zip(before[:2], after[:2], strict=True))
    return _Ranks(largest, highest, chosen)
