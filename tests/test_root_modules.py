"""The modules of the root: errors, quoting, versions."""

import ast
import inspect
import json
import os
import pickle
import re
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
from ortprep.telemetry import TELEMETRY_VARIABLE
from ortprep.versions import install_command, upgrade_command
from tests.prepare.builders import REPOSITORY

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
            setattr(error, name, {int: 3, float: 1.5}.get(type(getattr(kind, name)), -9))
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
        {"kind": "WorkerDiedError", "details": {"pid": "x", "exit_code": 99}},
        {"kind": "WorkerDiedError", "details": [1]},
    ],
)
def test_nonsense_from_another_process_is_an_error_with_defaults(data):
    error = errors.from_dict(data)
    assert all(getattr(error, name) == getattr(type(error), name) for name in error.details)


@pytest.mark.attack
def test_no_message_steers_the_terminal_of_who_logs_it():
    """ONNX Runtime's errors quote names of operators."""
    hostile = "\x1b]0;evil\x07\x1b[2J\u202e\r"
    error = errors.from_dict(
        errors.to_dict(errors.RunError(f"no operator {hostile}\n  in m.onnx", hint=f"rm {hostile}"))
    )
    for text in (error.message, str(error), repr(error)):
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


@pytest.mark.attack
def test_temporary_files_are_in_a_folder_that_the_package_chose():
    """`scratch_folder` checks whether others could exchange them; the standard library does not."""
    makers = {"TemporaryDirectory", "NamedTemporaryFile", "TemporaryFile", "mkdtemp", "mkstemp"}
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in makers
        and not any(one.arg == "dir" for one in node.keywords)
    ]
    assert found == []


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


# -- nothing that ortprep starts sends ONNX Runtime's usage data, as the kernel sees it

BUNDLE = REPOSITORY / "tests/compat/0.1.0/conv"
LOAD = "import sys; from ortprep.runtime import load; load(sys.argv[1])"
ORTPREP = ["-m", "ortprep"]
IMPORT = ["-c", "import onnxruntime"]
DOORS = {
    "load": ["-c", LOAD, str(BUNDLE)],
    "install": ["-c", "from ortprep.runtime import install; install(); import onnxruntime"],
    "session": ["-c", "from ortprep import session; import onnxruntime"],
    "run": [*ORTPREP, "run", "--bundles", str(BUNDLE), "--", sys.executable, *IMPORT],
    "adopt": [*ORTPREP, "adopt", "--", sys.executable, *IMPORT],
}
"""Each ends in a process that imports ONNX Runtime."""
LATE = {
    "load": "import ortprep.runtime; ortprep.runtime.load(sys.argv[1])",
    "install": "import ortprep.runtime; ortprep.runtime.install()",
    "session": "import ortprep; ortprep.session",
}
POOL = (
    "import sys; from ortprep.runtime import PoolConfig, SessionPool\n"
    "if __name__ == '__main__': SessionPool(sys.argv[1], PoolConfig(devices='cpu')).close()"
)
COMMANDS = {
    "load": ["-c", LOAD, str(BUNDLE)],
    "a pool and its worker": ["-c", POOL, str(BUNDLE)],
    "check, in a child for each variant": [*ORTPREP, "check", str(BUNDLE)],
    "a program of run": DOORS["run"],
}
CALLS = "socket,connect,open,openat,creat,mkdir,mkdirat,execve"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_no_process_opens_an_internet_socket_or_a_file_of_the_telemetry(tmp_path, arguments):
    home, trace = tmp_path / "home", tmp_path / "trace"
    home.mkdir()
    subprocess.run(
        ["strace", "-f", "-qq", "-e", f"trace={CALLS}", "-o", str(trace), sys.executable, *arguments],
        env=_environment(home),
        capture_output=True,
        check=True,
        timeout=300,
    )
    calls = trace.read_text(errors="replace").splitlines()
    assert any("libonnxruntime" in call or "onnxruntime_pybind11_state" in call for call in calls)
    assert [call for call in calls if re.search(r"AF_INET6?|Microsoft|\.onnxruntime/", call)] == []
    assert [path for path in home.rglob("*") if path.is_file() and "ortprep" not in path.parts] == []


@pytest.mark.attack
@pytest.mark.parametrize(
    ("door", "given", "found"), [*((door, None, "1") for door in DOORS), ("load", "0", "0"), ("run", "", "")]
)
def test_it_is_off_at_the_import_unless_the_user_says_otherwise(tmp_path, door, given, found):
    # A stand-in for ONNX Runtime says what it saw as it was imported; the real one would send something.
    (tmp_path / "onnxruntime.py").write_text(
        f"import os; raise ImportError('saw ' + repr(os.environ.get({TELEMETRY_VARIABLE!r})))"
    )
    environment = _environment(tmp_path) | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    if given is not None:
        environment[TELEMETRY_VARIABLE] = given
    assert f"saw {found!r}" in _run(DOORS[door], environment, cwd=tmp_path)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("door", "version", "given", "warnings"),
    [*((door, "1.29.0", None, 1) for door in LATE), ("load", "1.28.3", None, 0), ("load", "1.32.0", "0", 0)],
)
def test_an_application_that_imported_onnxruntime_before_gets_one_warning(
    tmp_path, door, version, given, warnings
):
    # The real ONNX Runtime, imported with the variable so that this test sends nothing, says another version.
    code = (
        f"import os, sys; os.environ[{TELEMETRY_VARIABLE!r}] = '1'; import onnxruntime\n"
        f"del os.environ[{TELEMETRY_VARIABLE!r}]; onnxruntime.__version__ = {version!r}\n"
        f"{'' if given is None else f'os.environ[{TELEMETRY_VARIABLE!r}] = {given!r}'}\n"
        f"for _ in range(2): {LATE[door]}\n"
        f"print('now', os.environ[{TELEMETRY_VARIABLE!r}], file=sys.stderr)"
    )
    said = _run(["-c", code, str(BUNDLE)], _environment(tmp_path), cwd=tmp_path)
    assert said.count(f"export {TELEMETRY_VARIABLE}=1") == warnings, said
    assert f"now {given or 1}" in said  # children of the process send nothing


def _run(arguments, environment, *, cwd):
    """Runs Python and returns what it wrote to stderr."""
    ended = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60, cwd=cwd
    )
    return ended.stderr


def _environment(home):
    hidden = (TELEMETRY_VARIABLE, "XDG_CACHE_HOME", "ORTPREP_CACHE_DIR")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**inherited, "HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
