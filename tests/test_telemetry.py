"""Nothing that ortprep starts sends ONNX Runtime's usage data, as the kernel sees it.

Official Linux wheels since 1.29 put a database below `~/.cache/Microsoft`, and a thread that uploads it, into
every process that imports them without `ORT_DISABLE_TELEMETRY=1`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ortprep.telemetry import TELEMETRY_VARIABLE
from tests.prepare.builders import REPOSITORY

BUNDLE = REPOSITORY / "tests/compat/0.1.0/conv"
LOAD = "import sys; from ortprep.runtime import load; load(sys.argv[1])"
POOL = (
    "import sys; from ortprep.runtime import PoolConfig, SessionPool\n"
    "if __name__ == '__main__': SessionPool(sys.argv[1], PoolConfig(devices='cpu')).close()"
)
COMMANDS = {
    "load": ["-c", LOAD, str(BUNDLE)],
    "a pool and its worker": ["-c", POOL, str(BUNDLE)],
    "check, in a child for each variant": ["-m", "ortprep", "check", str(BUNDLE)],
}
CALLS = "socket,connect,open,openat,creat,mkdir,mkdirat,execve"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_no_process_opens_an_internet_socket_or_a_file_of_the_telemetry(
    tmp_path: Path, arguments: list[str]
) -> None:
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


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0"), ("", "")])
def test_what_the_user_set_stays(tmp_path: Path, given: str | None, found: str) -> None:
    # A stand-in for ONNX Runtime says what it saw as it was imported; the real one would send something.
    (tmp_path / "onnxruntime.py").write_text(
        f"import os; raise ImportError('saw ' + repr(os.environ.get({TELEMETRY_VARIABLE!r})))"
    )
    environment = _environment(tmp_path) | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    if given is not None:
        environment[TELEMETRY_VARIABLE] = given
    ended = subprocess.run(
        [sys.executable, "-c", LOAD, str(BUNDLE)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert f"saw {found!r}" in ended.stderr


def _environment(home: Path) -> dict[str, str]:
    hidden = (TELEMETRY_VARIABLE, "XDG_CACHE_HOME", "ORTPREP_CACHE_DIR")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**inherited, "HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
