"""MLflow's tracking server, started for tests on a port of its own."""

from __future__ import annotations

import http.client
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes import free_port

# Before the client is imported, which otherwise reports its use to its makers.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 10.0
_TRIES = 3


@dataclass(frozen=True)
class MlflowServer:
    """A running server.

    Attributes:
        url: `http://host:port`.
        folder: Where its artifacts are.
    """

    url: str
    folder: Path


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """Runs a server, which keeps artifacts itself, until the block ends; skips where MLflow is not whole.

    Args:
        folder: An empty folder for its database and its artifacts.
    """
    if any(importlib.util.find_spec(name) is None for name in ("mlflow", "flask", "sqlalchemy", "uvicorn")):
        pytest.skip("mlflow's server is not installed")
    process, port = _start(folder)
    try:
        yield MlflowServer(f"http://127.0.0.1:{port}", folder / "artifacts")
    finally:
        _stop(process)


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(_TRIES):
        port = free_port()
        process = _spawn(folder, port)
        if _wait_until_ready(process, port):
            return process, port
        _stop(process)
    raise AssertionError("MLflow does not start: " + (folder / "log").read_text()[-2000:])


def _spawn(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"),
        *("--serve-artifacts", "--artifacts-destination", str(folder / "artifacts")),
    ]
    settings = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    # A session of its own: the server starts processes that outlive it.
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | settings,
            cwd=folder,
            start_new_session=True,
        )


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                connection.close()
                return True
        connection.close()
        time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
            if number is signal.SIGKILL or not _is_group_alive(process.pid):
                return


def _is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
