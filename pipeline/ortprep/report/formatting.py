"""Figures as people read them; one place, so that the page says the same thing in the same words. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from ortprep.bundle.tuning_record import Summary
from ortprep.report.content import Cell, Column, ReportTable, Tone

CellValue: TypeAlias = Cell | str | float | Summary | None
"""What `make_table` makes a cell of."""

ABSENT = "–"
"""What stands where there is no figure."""


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


def format_spread(summary: Summary) -> str:
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


def format_cost(value: float) -> str:
    """Returns a ratio of costs, with the digits that plans are told apart by."""
    return f"{value:.3g}×"


def format_mb(size_bytes: int) -> str:
    """Returns a size in MB of 2**20 bytes."""
    return f"{format_number(size_bytes / 2**20)} MB"


def format_duration(seconds: float) -> str:
    """Returns `0.4 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 60:
        return f"{format_number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_instant(iso: str) -> str:
    """Returns an ISO 8601 instant without its seconds and zone; all here are UTC."""
    return f"{iso[:16].replace('T', ' ')} UTC" if len(iso) >= 16 and iso[10:11] == "T" else iso


def count_of(number: int, noun: str) -> str:
    """Returns `1 trial` or `3 trials`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def join_words(words: Sequence[str]) -> str:
    """Returns `a, b and c`."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def text_cell(text: str, tone: Tone = "plain", *, link: str = "") -> Cell:
    """Returns a cell of words."""
    return Cell(text or ABSENT, None, tone, link)


def number_cell(value: float | None, text: str | None = None, tone: Tone = "plain") -> Cell:
    """Returns a cell of one figure, sorted by it; a dash for None."""
    if value is None:
        return Cell(ABSENT)
    return Cell(text or format_number(value), value if math.isfinite(value) else None, tone)


def spread_cell(summary: Summary | None) -> Cell:
    """Returns a cell of a median and its spread, sorted by the median."""
    return Cell(ABSENT) if summary is None else number_cell(summary.median, format_spread(summary))


def ratio_cell(value: float | None, tone: Tone = "plain") -> Cell:
    """Returns a cell of a ratio."""
    return Cell(ABSENT) if value is None else number_cell(value, format_ratio(value), tone)


def rounded(value: float) -> float | None:
    """Returns a figure with five digits, for a chart: more cannot be seen; None if it cannot be drawn."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def make_table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Iterable[CellValue]],
    *,
    sortable: bool = False,
    filterable: bool = False,
) -> ReportTable:
    """Returns a table; after `>` a heading is of figures, after `~` of texts that may be long."""
    columns = tuple(Column(one.lstrip(">~"), one.startswith(">"), one.startswith("~")) for one in headings)
    cells = tuple(tuple(map(_cell_of, row)) for row in rows)
    return ReportTable(caption, columns, cells, sortable, filterable)


def _cell_of(value: CellValue) -> Cell:
    if isinstance(value, Cell):
        return value
    if isinstance(value, str):
        return text_cell(value)
    if isinstance(value, Summary):
        return spread_cell(value)
    return Cell(str(value), value) if type(value) is int else number_cell(value)
