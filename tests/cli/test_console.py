from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.cli.console import draw_waterfall, start_logging, write_table
from ortprep.tables import Table

texts = st.text(st.characters(categories=["Ll", "Lu", "Nd"]), min_size=1, max_size=60)


@given(st.lists(st.tuples(*[texts] * 6), min_size=1, max_size=4))
def test_a_table_in_a_pipe_has_every_character_in_lines_of_a_hundred(rows: list[tuple[str, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        written: list[str] = []
        patch.setattr("sys.stdout.write", written.append)
        write_table(Table("title", ("name", *"abcde"), tuple(rows)))
    lines = "".join(written).splitlines()
    assert max(map(len, lines)) <= 100
    assert sorted("".join(lines[4:]).replace(" ", "")) == sorted("".join("".join(row) for row in rows))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_a_bar_begins_where_the_one_before_it_ended(figures: list[float]) -> None:
    bars = draw_waterfall(figures, cells=40)
    begins = [len(bar) - len(bar.lstrip()) for bar in bars]
    assert begins == sorted(begins)
    assert all(len(bar) <= 42 for bar in bars)
    assert all(bar.strip() for bar in bars)


@pytest.mark.attack
def test_no_other_packages_debug_log_reaches_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx and botocore log signed addresses, cookies and session tokens there."""
    own = logging.getLogger("ortprep")
    levels = logging.root.level, own.level
    monkeypatch.setattr(logging.root, "handlers", [])
    try:
        start_logging("debug")
        assert own.getEffectiveLevel() == logging.DEBUG
        assert logging.getLogger("botocore").getEffectiveLevel() == logging.WARNING
    finally:
        logging.root.setLevel(levels[0])
        own.setLevel(levels[1])
