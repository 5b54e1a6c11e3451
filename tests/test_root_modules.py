"""The modules of the root: errors, quoting, tables, versions."""

import ast
import inspect
import json
import math
import pickle
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep import errors
from ortprep.quoting import printable, quoted
from ortprep.runtime.pool.worker_state import OutputTail
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
from ortprep.versions import install_command, upgrade_command
from tests.report.builders import around

# -- errors cross process borders whole

ALL = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PipelineError)
]


def test_every_error_survives_pickling_and_is_found_by_its_name():
    for kind in ALL:
        back = pickle.loads(pickle.dumps(kind("what failed: x\n  expected 1, got 2", hint="run this")))
        assert type(back) is kind
        assert (back.message, back.hint, str(back)) == (
            "what failed: x\n  expected 1, got 2",
            "run this",
            "what failed: x\n  expected 1, got 2\n\nhint: run this",
        )
        assert errors.error_named(kind.__name__) is kind


@pytest.mark.parametrize("name", ["Exception", "annotations", "", "printable", "os"])
def test_a_name_that_is_no_error_of_ours_gives_the_root(name):
    assert errors.error_named(name) is errors.PipelineError


def test_every_error_survives_as_json():
    for kind in ALL:
        error = kind("what failed", hint="run this")
        for name in kind.details:
            setattr(error, name, {int: 3, float: 1.5, tuple: ("a", "b")}.get(type(getattr(kind, name)), -9))
        back = errors.from_dict(json.loads(json.dumps(errors.to_dict(error))))
        assert type(back) is kind
        assert (back.message, back.hint, back.__dict__) == ("what failed", "run this", error.__dict__)


def test_an_error_of_another_library_arrives_as_a_refused_run():
    back = errors.from_dict(errors.to_dict(MemoryError("no more")))
    assert isinstance(back, errors.RunError)
    assert "MemoryError: no more" in str(back)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"kind": 3, "message": None, "hint": 5},
        {"kind": "WorkerDiedError", "details": {"pid": "x", "stderr": 3, "exit_code": 99}},
        {"kind": "WorkerDiedError", "details": [1]},
    ],
)
def test_nonsense_from_another_process_is_an_error_with_defaults(data):
    error = errors.from_dict(data)
    assert all(getattr(error, name) == getattr(type(error), name) for name in error.details)


@pytest.mark.attack
def test_no_message_steers_the_terminal_of_who_logs_it():
    """ONNX Runtime's errors quote names of operators, a worker's output anything."""
    hostile = "\x1b]0;evil\x07\x1b[2J\u202e\r"
    error = errors.from_dict(
        errors.to_dict(errors.RunError(f"no operator {hostile}\n  in m.onnx", hint=f"rm {hostile}"))
    )
    output = OutputTail()
    lines = [*output.add(f"{hostile}\n{hostile}".encode()), *output.lines]
    for text in (error.message, str(error), repr(error), *lines):
        assert not set(hostile) & set(text) - set("evil]0;[2J")
    assert "\n  in m.onnx" in error.message


# -- what comes from outside is quoted in every command that a hint tells people to run

PACKAGE = Path(__file__).parents[1] / "pipeline" / "ortprep"
QUOTING = ("quoted", "hint_to_install", "_command")
"""How the names of functions end that return quoted words and commands."""


@pytest.mark.attack
@given(words=st.lists(st.text()))
def test_a_shell_reads_back_the_words_that_were_quoted(words):
    assert shlex.split(quoted(*words)) == words


@pytest.mark.attack
@given(text=st.text())
def test_nothing_printable_steers_a_terminal(text):
    assert all(one.isprintable() or one in "\n\t" for one in printable(text))
    assert "\n" not in printable(text, lines=False)


@pytest.mark.attack
def test_every_value_in_a_hint_is_quoted():
    found = [
        f"{file.relative_to(PACKAGE)}:{value.lineno}: {{{ast.unparse(value)}}}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for hint in _hints(ast.parse(file.read_text()))
        for value in _unquoted(hint)
    ]
    assert found == []


@pytest.mark.attack
@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("raise E(hint=f'rm {path}')", 1),
        ("hint = f'rm {path}' if path else None", 1),
        ("def _hint(path): return f'rm {path}'", 1),
        ("raise E(hint=f'rm {quoted(path)} {NAME} {number:d} load({name!r})')", 0),
    ],
)
def test_the_law_above_sees_what_breaks_it(source, count):
    assert len([value for hint in _hints(ast.parse(source)) for value in _unquoted(hint)]) == count


def _hints(tree):
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


def _unquoted(node):
    """Yields values of a hint that are neither quoted, for a shell or Python, nor constants or numbers."""
    if isinstance(node, ast.FormattedValue):
        is_number = node.format_spec is not None and ast.unparse(node.format_spec).strip("f'\"") in ("d", "g")
        is_constant = isinstance(node.value, ast.Name) and node.value.id.isupper()
        if not (is_number or is_constant or node.conversion == ord("r") or _is_quoted(node.value)):
            yield node.value
    elif not _is_quoted(node):
        for child in ast.iter_child_nodes(node):
            yield from _unquoted(child)


def _is_quoted(node):
    if not isinstance(node, ast.Call):
        return False
    is_list = ast.unparse(node).startswith("', '.join(map(quoted, ")
    return is_list or ast.unparse(node.func).rpartition(".")[2].endswith(QUOTING)


# -- tables: filled from records, with figures as people read them


def test_a_column_is_a_heading_and_a_function_of_a_record():
    columns = (
        ("of", str),
        ("square", lambda n: n * n),
        ("as", lambda n: around(float(n), spread=0.0) if n < 3 else None),
    )
    table = fill_table("squares", (2, 30), columns, marked=1)
    assert [[cell.text for cell in row] for row in table.cells] == [["2", "4", "2.0 ± 0"], ["30", "900", "–"]]
    assert table.numeric == (False, True, True)
    assert (table.columns, table.marked, table.is_long) == (("of", "square", "as"), 1, False)


def test_texts_that_are_long_make_a_wide_column_and_what_is_not_there_a_dash():
    table = Table("", ("a", "b", "c"), (("x" * 30, "", Cell("x" * 30, 1.0)), ("x", "short", math.inf)))
    assert table.wide == (True, False, False)
    assert [cell.text for cell in table.cells[0]][1] == "–"
    assert table.cells[1][2] == Cell("inf"), "what cannot be sorted has no value"


def test_figures_have_about_three_digits():
    texts = [format_number(value) for value in (1204.4, 37.44, 5.04, 0.516, 0.0, 0.017253, math.inf)]
    assert texts == ["1204", "37.4", "5.0", "0.52", "0.00", "0.0173", "inf"]
    spreads = [(100, 0.04), (27.3, 0.0003), (0.0173, 0.3), (0.01, 0.002), (5, 0)]
    told = [format_spread(around(median, spread=spread)) for median, spread in spreads]
    assert told == ["100 ± 4", "27.3 ± 0.008", "0.0173 ± 0.005", "0.01 ± 0.00002", "5.0 ± 0"]
    assert [format_duration(value) for value in (0.4, 200, 7500)] == ["0.40 s", "3 min 20 s", "2 h 5 min"]
    assert [format_ratio(value) for value in (0.987, 5.24, 240.0)] == ["0.99×", "5.2×", "240×"]
    assert format_instant("2026-11-20T08:30:00+00:00") == "2026-11-20 08:30 UTC"
    assert format_instant("yesterday") == "yesterday"


# -- the commands that install ortprep: from a checkout, a wheel, a repository or an index

ROOT = Path(__file__).resolve().parents[1]
PRINT = "from ortprep.versions import *; print(install_command('build', 'gpu')); print(upgrade_command())"
WHEEL = {"url": "file:///srv/my wheels/ortprep-0.1.0-py3-none-any.whl", "archive_info": {}}
GIT = {"url": "https://example.org/ortprep.git", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}}


def test_a_checkout_is_installed_again_in_place():
    assert install_command("ray") == f"pip install -e '{ROOT}[ray]'"
    assert install_command() == f"pip install -e {ROOT}"
    assert upgrade_command() == f"git -C {ROOT} pull"


@pytest.mark.parametrize(
    ("record", "install", "upgrade"),
    [
        (WHEEL, f"'ortprep[build,gpu] @ {WHEEL['url']}'", "ortprep-NEWER.whl"),
        (GIT, f"'ortprep[build,gpu] @ git+{GIT['url']}@{'0' * 40}'", "ortprep-NEWER.whl"),
        (None, "'ortprep[build,gpu]'", "--upgrade ortprep"),
    ],
    ids=["a wheel", "a repository", "an index"],
)
def test_what_pip_installed_is_installed_from_where_it_came(tmp_path, record, install, upgrade):
    (tmp_path / "ortprep").mkdir()
    for name in ("__init__.py", "quoting.py", "versions.py"):
        shutil.copy(ROOT / "pipeline" / "ortprep" / name, tmp_path / "ortprep" / name)
    metadata = tmp_path / "ortprep-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ortprep\nVersion: 0.1.0\n")
    if record is not None:
        (metadata / "direct_url.json").write_text(json.dumps(record))
    done = subprocess.run(
        [sys.executable, "-S", "-c", PRINT],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"pip install {install}", f"pip install {upgrade}"]
