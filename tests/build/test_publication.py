"""What the `publish` section of a stranger's spec cannot do."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ortprep.build.publication import publish_model
from ortprep.errors import AccessDeniedError
from ortprep.spec.reading import read_spec
from tests.registry.builders import write_bundle

pytestmark = pytest.mark.attack

TOKEN = "corporate-token"


class Server(HTTPServer):
    """A server that refuses everything, and keeps the logins it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Refusal)
        self.logins: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Refusal(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        cast("Server", self.server).logins.append(self.headers.get("Authorization"))
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def login(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("ORTPREP_REGISTRY", raising=False)


def publish_to(registry: str, folder: Path) -> None:
    file = folder / "net.yaml"
    file.write_text(f"name: net\nsource: {{path: net.onnx}}\npublish: {{registry: '{registry}'}}\n")
    plan = SimpleNamespace(spec=read_spec(file))
    publish_model(cast("Any", SimpleNamespace(plan=plan, folder=write_bundle(folder / "bundle"))), print)


@pytest.mark.parametrize("scheme", ["mlflow+", "MLflow+", "mlflow://x+"])
@pytest.mark.parametrize("variable", ["MLFLOW_TRACKING_URI", "ORTPREP_REGISTRY"])
def test_a_server_that_only_the_spec_names_gets_no_login(server, tmp_path, monkeypatch, scheme, variable):
    start = "mlflow+" if variable == "ORTPREP_REGISTRY" else ""
    monkeypatch.setenv(variable, f"{start}http://127.0.0.1:{server.server_port - 1}")
    with pytest.raises(AccessDeniedError, match="only the spec names"):
        publish_to(f"{scheme}{server.url}", tmp_path)
    assert server.logins == []


@pytest.mark.parametrize("variable", ["MLFLOW_TRACKING_URI", "ORTPREP_REGISTRY"])
def test_the_users_own_server_gets_the_login(server, tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, f"mlflow+{server.url}" if variable == "ORTPREP_REGISTRY" else server.url)
    with pytest.raises(AccessDeniedError, match="403"):
        publish_to(f"mlflow+{server.url}", tmp_path)
    assert set(server.logins) == {f"Bearer {TOKEN}"}
