"""An S3 server for tests: moto's, spoken to over HTTP by s3fs as Amazon's is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.registry.oci_server import free_port

_READY_S = 60.0
BUCKET = "bucket"


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Runs a server with one empty bucket; yields its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=log,
            env=environment,
        )
    try:
        _make_bucket(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _make_bucket(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_S
    request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except (urllib.error.URLError, OSError):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return
