"""Real registries, started for tests on ports of their own: docker-registry, MLflow, moto."""

from __future__ import annotations

import http.client
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes import free_port

# Before MLflow's client is imported, which otherwise reports its use to its makers.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "true"

BUCKET = "bucket"
USER, PASSWORD = "publisher", "hunter2-of-the-tests"
_HTPASSWD = "$2y$04$ClvQQvmanRu2NdLFAjbYJO7gokgFhIX1N5JO/DsXYctKhHoFZMNdK"
_START_TIMEOUT_S, _STOP_TIMEOUT_S, _TRIES = 300.0, 10.0, 3

_OCI_CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: "{folder}/data"}}
  delete: {{enabled: true}}
  maintenance: {{uploadpurging: {{enabled: false}}}}
http: {{addr: "127.0.0.1:{port}", secret: only-for-tests}}
"""
_OCI_AUTH = """auth: {{htpasswd: {{realm: tests, path: "{folder}/htpasswd"}}}}\n"""


@dataclass(frozen=True)
class Server:
    """A running server, at `http://host:port`, and the folder where it keeps files."""

    url: str
    folder: Path


@contextmanager
def oci_server(folder, *, auth=False):
    """Runs a registry until the block ends; skips the test where none is installed.

    Args:
        folder: An empty folder for its storage and configuration.
        auth: Whether it wants `USER` with `PASSWORD`.
    """
    binary = shutil.which("docker-registry")
    if binary is None:
        pytest.skip("docker-registry is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "htpasswd").write_text(f"{USER}:{_HTPASSWD}\n")

    def command(port):
        template = _OCI_CONFIG + (_OCI_AUTH if auth else "")
        config = folder / "config.yml"
        config.write_text(template.format(folder=folder, port=port))
        return [binary, "serve", str(config)]

    with _run_server(command, folder, "/v2/", {}) as url:
        yield Server(url, folder)


@contextmanager
def mlflow_server(folder):
    """Runs a server, which keeps artifacts itself, until the block ends; skips where MLflow is not whole.

    Args:
        folder: An empty folder for its database and its artifacts.
    """
    if any(importlib.util.find_spec(name) is None for name in ("mlflow", "flask", "sqlalchemy", "uvicorn")):
        pytest.skip("mlflow's server is not installed")

    def command(port):
        return [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
            *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"),
            *("--serve-artifacts", "--artifacts-destination", str(folder / "artifacts")),
        ]

    with _run_server(command, folder, "/health", {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}) as url:
        yield Server(url, folder / "artifacts")


@contextmanager
def s3_server(folder):
    """Runs a server with one empty bucket; yields its URL."""

    def command(port):
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with _run_server(command, folder, "/moto-api/", keys) as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=60).close()
        yield url


@contextmanager
def _run_server(command, folder, ready_path, settings):
    """Runs a command that listens at a port; yields its URL once it answers."""
    for _ in range(_TRIES):
        port = free_port()
        with (folder / "log").open("wb") as log:
            # A session of its own: a server may start processes that outlive it.
            process = subprocess.Popen(
                command(port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | settings,
                cwd=folder,
                start_new_session=True,
            )
        try:
            if _is_ready(process, port, ready_path):
                yield f"http://127.0.0.1:{port}"
                return
        finally:
            _stop(process)
    raise AssertionError("a server does not start: " + (folder / "log").read_text()[-2000:])


def _is_ready(process, port, path):
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            if connection.getresponse().status in (200, 401):
                connection.close()
                return True
        connection.close()
        time.sleep(0.05)
    return False


def _stop(process):
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
            if number is signal.SIGKILL or not _is_group_alive(process.pid):
                return


def _is_group_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
