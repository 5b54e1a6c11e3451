"""Nothing that ortprep starts sends ONNX Runtime's usage data, as the kernel sees it.

Official Linux wheels since 1.29 put a database below `~/.cache/Microsoft`, and a thread that uploads it, into
every process that imports them without `ORT_DISABLE_TELEMETRY=1`.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from ortprep.telemetry import TELEMETRY_VARIABLE
from tests.prepare.builders import REPOSITORY

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
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0"), ("", "")])
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
@pytest.mark.parametrize("door", LATE)
@pytest.mark.parametrize(
    ("version", "given", "warnings"), [("1.29.0", None, 1), ("1.28.3", None, 0), ("1.32.0", "0", 0)]
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
