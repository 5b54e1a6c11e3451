from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.cli.console import build_table, write_table

texts = st.text(st.characters(categories=["Ll", "Lu", "Nd"]), min_size=1, max_size=60)


@given(st.lists(st.tuples(*[texts] * 6), min_size=1, max_size=4))
def test_a_table_in_a_pipe_has_every_character_in_lines_of_a_hundred(rows: list[tuple[str, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        written: list[str] = []
        patch.setattr("sys.stdout.write", written.append)
        write_table(build_table("title", ("name", *(f">{name}" for name in "abcde")), rows))
    lines = "".join(written).splitlines()
    assert max(map(len, lines)) <= 100
    assert sorted("".join(lines[4:]).replace(" ", "")) == sorted("".join("".join(row) for row in rows))
