"""Tables: filled from records, with figures as people read them."""

from __future__ import annotations

import math

from ortprep.tables import (
    Cell,
    Table,
    fill_table,
    format_duration,
    format_instant,
    format_number,
    format_ratio,
    format_spread,
)
from tests.report.builders import around


def test_a_column_is_a_heading_and_a_function_of_a_record() -> None:
    columns = (
        ("of", str),
        ("square", lambda n: n * n),
        ("as", lambda n: around(float(n), spread=0.0) if n < 3 else None),
    )
    table = fill_table("squares", (2, 30), columns, marked=1)
    assert [[cell.text for cell in row] for row in table.cells] == [["2", "4", "2.0 ± 0"], ["30", "900", "–"]]
    assert table.numeric == (False, True, True)
    assert (table.columns, table.marked, table.is_long) == (("of", "square", "as"), 1, False)


def test_texts_that_are_long_make_a_wide_column_and_what_is_not_there_a_dash() -> None:
    table = Table("", ("a", "b", "c"), (("x" * 30, "", Cell("x" * 30, 1.0)), ("x", "short", math.inf)))
    assert table.wide == (True, False, False)
    assert [cell.text for cell in table.cells[0]][1] == "–"
    assert table.cells[1][2] == Cell("inf"), "what cannot be sorted has no value"


def test_figures_have_about_three_digits() -> None:
    texts = [format_number(value) for value in (1204.4, 37.44, 5.04, 0.516, 0.0, 0.017253, math.inf)]
    assert texts == ["1204", "37.4", "5.0", "0.52", "0.00", "0.0173", "inf"]
    spreads = [(100, 0.04), (27.3, 0.0003), (0.0173, 0.3), (0.01, 0.002), (5, 0)]
    told = [format_spread(around(median, spread=spread)) for median, spread in spreads]
    assert told == ["100 ± 4", "27.3 ± 0.008", "0.0173 ± 0.005", "0.01 ± 0.00002", "5.0 ± 0"]
    assert [format_duration(value) for value in (0.4, 200, 7500)] == ["0.40 s", "3 min 20 s", "2 h 5 min"]
    assert [format_ratio(value) for value in (0.987, 5.24, 240.0)] == ["0.99×", "5.2×", "240×"]
    assert format_instant("2026-11-20T08:30:00+00:00") == "2026-11-20 08:30 UTC"
    assert format_instant("yesterday") == "yesterday"
