"""What comes from outside is quoted in every command that a hint tells people to run."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.quoting import printable, quoted

PACKAGE = Path(__file__).parents[1] / "pipeline" / "ortprep"
QUOTING = ("quoted", "hint_to_install", "_command")
"""How the names of functions end that return quoted words and commands."""

pytestmark = pytest.mark.attack


@given(words=st.lists(st.text()))
def test_a_shell_reads_back_the_words_that_were_quoted(words: list[str]) -> None:
    assert shlex.split(quoted(*words)) == words


@given(text=st.text())
def test_nothing_printable_steers_a_terminal(text: str) -> None:
    assert all(one.isprintable() or one in "\n\t" for one in printable(text))
    assert "\n" not in printable(text, lines=False)


def test_every_value_in_a_hint_is_quoted() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}:{value.lineno}: {{{ast.unparse(value)}}}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for hint in _hints(ast.parse(file.read_text()))
        for value in _unquoted(hint)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("raise E(hint=f'rm {path}')", 1),
        ("hint = f'rm {path}' if path else None", 1),
        ("def _hint(path): return f'rm {path}'", 1),
        ("raise E(hint=f'rm {quoted(path)} {NAME} {number:d} load({name!r})')", 0),
    ],
)
def test_the_law_above_sees_what_breaks_it(source: str, count: int) -> None:
    assert len([value for hint in _hints(ast.parse(source)) for value in _unquoted(hint)]) == count


def _hints(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions that become hints, by the names of what takes them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (one.value for one in node.keywords if one.arg == "hint")
        elif isinstance(node, ast.Assign) and any(
            "hint" in ast.unparse(name).lower() for name in node.targets
        ):
            yield node.value
        elif isinstance(node, ast.FunctionDef) and "hint" in node.name:
            yield from (one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value)


def _unquoted(node: ast.AST) -> Iterator[ast.expr]:
    """Yields values of a hint that are neither quoted, for a shell or Python, nor constants or numbers."""
    if isinstance(node, ast.FormattedValue):
        is_number = node.format_spec is not None and ast.unparse(node.format_spec).strip("f'\"") in ("d", "g")
        is_constant = isinstance(node.value, ast.Name) and node.value.id.isupper()
        if not (is_number or is_constant or node.conversion == ord("r") or _is_quoted(node.value)):
            yield node.value
    elif not _is_quoted(node):
        for child in ast.iter_child_nodes(node):
            yield from _unquoted(child)


def _is_quoted(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    is_list = ast.unparse(node).startswith("', '.join(map(quoted, ")
    return is_list or ast.unparse(node.func).rpartition(".")[2].endswith(QUOTING)
