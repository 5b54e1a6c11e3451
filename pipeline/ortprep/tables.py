"""Tables of figures, filled from records and rendered on the terminal.

The figures in them are formatted here too, so that every table shows the same figure in the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ortprep.bundle.figures import Samples

R = TypeVar("R")

ABSENT = "–"
"""What stands where there is no figure."""


@dataclass(frozen=True)
class Cell:
    """A table's entry.

    Attributes:
        text: Text for people, with a dash where there is no figure.
        value: The figure, None for text.
    """

    text: str
    value: float | None = None


CellValue: TypeAlias = Cell | str | float | Samples | None
"""A cell, or what one is made of: text, a figure, a median with its spread, or None for no figure."""


@dataclass(frozen=True)
class Table:
    """Figures or facts in rows; units are in the headings.

    Attributes:
        title: Title of the table.
        columns: Headings with their units.
        rows: One value per column.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[CellValue, ...], ...]

    @functools.cached_property
    def cells(self) -> tuple[tuple[Cell, ...], ...]:
        """Every row's cells, with their texts."""
        return tuple(tuple(map(make_cell, row)) for row in self.rows)

    @functools.cached_property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column has figures; those stand to the right."""
        return tuple(any(row[i].value is not None for row in self.cells) for i in range(len(self.columns)))


def fill_table(
    title: str,
    records: Iterable[R],
    columns: Sequence[tuple[str, Callable[[R], CellValue]]],
) -> Table:
    """Returns a table with a row per record.

    Args:
        title: Title of the table.
        records: One record per row.
        columns: A heading with its unit, and a function from a record to the column's value.
    """
    rows = tuple(tuple(read(record) for _, read in columns) for record in records)
    return Table(title, tuple(heading for heading, _ in columns), rows)


def make_cell(value: CellValue) -> Cell:
    """Returns the cell of a value, with the text that people read."""
    if isinstance(value, Cell):
        return value
    if value is None or value == "":
        return Cell(ABSENT)
    if isinstance(value, str):
        return Cell(value)
    if isinstance(value, Samples):
        return number_cell(value.median, format_spread(value))
    return number_cell(value, str(value) if isinstance(value, int) else None)


def number_cell(value: float | None, text: str | None = None) -> Cell:
    """Returns a cell of one figure; a dash for None."""
    if value is None:
        return Cell(ABSENT)
    return Cell(text or format_number(value), value if math.isfinite(value) else None)


def format_number(value: float) -> str:
    """Returns a figure with about three digits: `1204`, `37.4`, `0.52`, `0.0172`."""
    if not math.isfinite(value):
        return str(value)
    if 0 < abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    size = abs(value)
    return 0 if size >= 100 else 1 if size >= 1 else 2


def format_spread(summary: Samples) -> str:
    """Returns `median ± half the distance between quartiles`; the latter has the digits it needs, no more."""
    median, half = summary.median, (summary.p75 - summary.p25) / 2
    if not math.isfinite(half) or half <= 0:
        return f"{format_number(median)} ± {0 if half == 0 else half}"
    digits = _decimals(median) if half >= 10.0 ** -_decimals(median) else math.ceil(-math.log10(half))
    return f"{format_number(median)} ± {half:.{min(digits, 6)}f}"


def format_ratio(value: float) -> str:
    """Returns `5.2×`, with a second digit after the point where small differences count."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.2f}×" if value < 2 else f"{value:.1f}×" if value < 100 else f"{value:.0f}×"


def count_of(number: int, noun: str) -> str:
    """Returns `1 trial` or `3 trials`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
