"""The figures of `bench.code_size`, on a package of two modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.code_size import measure_code

MODULE = """
def first(a, /, b, *, c):
    return a


class C:
    async def second(self):
        def inner():
            return 1

        return inner
"""


def test_every_function_counts_with_its_length_and_parameters(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "inner" / "module.py").write_text(MODULE)
    figures = measure_code(tmp_path)
    assert (figures["modules"], figures["lines"], figures["functions"]) == (2, 11, 3)
    assert (figures["function length, median"], figures["longest function, lines"]) == (2, 5)
    assert figures["most parameters"] == 3


def test_a_folder_without_modules_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no Python files"):
        measure_code(tmp_path)
