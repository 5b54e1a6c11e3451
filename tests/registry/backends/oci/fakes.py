"""Debian's OCI registry, started for a test on a port of its own."""

from __future__ import annotations

import http.client
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes import free_port

USER = "publisher"
PASSWORD = "hunter2-of-the-tests"
_HTPASSWD = "$2y$04$ClvQQvmanRu2NdLFAjbYJO7gokgFhIX1N5JO/DsXYctKhHoFZMNdK"
_START_TIMEOUT_S = 120.0
_TRIES = 3

_CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: "{folder}/data"}}
  delete: {{enabled: {delete}}}
  maintenance: {{uploadpurging: {{enabled: false}}}}
http: {{addr: "127.0.0.1:{port}", secret: only-for-tests}}
"""
_AUTH = """auth: {{htpasswd: {{realm: tests, path: "{folder}/htpasswd"}}}}\n"""


@dataclass(frozen=True)
class OciServer:
    """A running registry.

    Attributes:
        url: `http://host:port`.
        host: `host:port`.
        folder: Where its storage is.
    """

    url: str
    host: str
    folder: Path


@contextmanager
def oci_server(folder: Path, *, delete: bool = True, auth: bool = False) -> Iterator[OciServer]:
    """Runs a registry until the block ends; skips the test where none is installed.

    Args:
        folder: An empty folder for its storage and configuration.
        delete: Whether manifests can be deleted.
        auth: Whether it wants `USER` with `PASSWORD`.
    """
    binary = shutil.which("docker-registry")
    if binary is None:
        pytest.skip("docker-registry is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "htpasswd").write_text(f"{USER}:{_HTPASSWD}\n")
    process, port = _start(binary, folder, delete=delete, auth=auth)
    try:
        yield OciServer(f"http://127.0.0.1:{port}", f"127.0.0.1:{port}", folder)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _start(binary: str, folder: Path, *, delete: bool, auth: bool) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(_TRIES):
        port = free_port()
        template = _CONFIG + (_AUTH if auth else "")
        config = folder / "config.yml"
        config.write_text(template.format(folder=folder, port=port, delete=str(delete).lower()))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [binary, "serve", str(config)], stdout=log, stderr=log, cwd=folder, stdin=subprocess.DEVNULL
            )
        if _is_ready(process, port):
            return process, port
        process.kill()
        process.wait(10)
    raise RuntimeError(f"docker-registry does not start: {(folder / 'log').read_text()[-2000:]}")


def _is_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/v2/")
            if connection.getresponse().status in (200, 401):
                connection.close()
                return True
        connection.close()
        time.sleep(0.05)
    return False
