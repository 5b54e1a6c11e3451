"""Answers of registries have limits, whatever the server does."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import threading
import tracemalloc
from contextlib import suppress

import pytest

from ortprep.errors import PipelineError, RegistryError, RegistryUnavailableError
from ortprep.registry.backends.mlflow_server import MlflowServer, ProxiedArtifacts
from ortprep.registry.backends.oci_auth import open_client
from ortprep.stages.fetch.sources import WebFile, fetch_file
from ortprep.transport import http_answers
from tests.fakes import send_status, serve, trickling_server, wait_for

pytestmark = pytest.mark.attack

HEAD = b"HTTP/1.1 200 OK\r\n"
FIXED = HEAD + b"Content-Length: 9999999\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;"


def end_of(call):
    """What a call raises within half a minute, None if nothing."""
    raised: list[BaseException] = []

    def run():
        try:
            call()
        except RegistryUnavailableError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    return raised[0] if raised else None


def ask(url):
    host = url.split("/")[2]
    client = open_client(host, secure=False, timeout_s=(10, 60))
    return client.open("GET", client.base, "ask", expected=(200, 503), follows=True)


@pytest.mark.parametrize("before", [HEAD + b"A: ", FIXED, CHUNKED])
def test_a_document_that_comes_a_byte_at_a_time_is_given_up(monkeypatch, before):
    monkeypatch.setattr(http_answers, "ANSWER_TIMEOUT_S", 0.3)

    def read():
        with ask(url) as response:
            http_answers.read_body(response, "ask", 10**8)

    with trickling_server(before) as url:
        error = end_of(read)
    assert isinstance(error, RegistryUnavailableError), "it does not wait for ever"
    assert "nothing in time" in str(error)


@pytest.mark.parametrize("before", [FIXED, CHUNKED])
def test_a_file_that_comes_a_byte_at_a_time_is_given_up(monkeypatch, before):
    monkeypatch.setattr(http_answers, "BLOCK_TIMEOUT_S", 0.3)

    def read():
        with http_answers.open_file(lambda _: ask(url), "ask", 0) as opened:
            list(opened.blocks)

    with trickling_server(before) as url:
        error = end_of(read)
    assert isinstance(error, RegistryUnavailableError), "it does not wait for ever"
    assert "nothing in time" in str(error)


@pytest.mark.parametrize(
    ("before", "endless"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000),
        (HEAD + b"A: ", b"x"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"A: x\r\n" * 40_000),
        (b"\x16\x03\x03\x40\x00", b"x"),
    ],
    ids=["continue", "header", "trailers", "handshake"],
)
@pytest.mark.parametrize("first", [b"", HEAD + b"Content-Length: 0\r\n\r\n"], ids=["new", "kept"])
def test_a_request_that_is_given_up_leaves_no_thread(monkeypatch, before, endless, first):
    """A process that lives on would have one more after every look at such a registry."""
    monkeypatch.setattr(http_answers, "ANSWER_TIMEOUT_S", 0.3)
    is_tls = before[:1] == b"\x16"
    if is_tls and first:
        pytest.skip("a connection that is kept has shaken hands")

    def read():
        http_answers.read_body(client.open("GET", client.base, "ask"), "ask", 10**8)

    with trickling_server(before, endless, first=first) as url:
        client = open_client(url.split("/")[2], secure=is_tls, timeout_s=(10, 60))
        if first:
            read()
        assert "nothing in time" in str(end_of(read))
        wait_for(
            lambda: not any(thread.name == "ortprep-network" for thread in threading.enumerate()),
            what="the request ends",
            timeout_s=20,
        )
        client.close()


def test_a_header_that_is_none_brings_no_secret_into_the_log(caplog):
    """`urllib3` logs the URL of such an answer, and all headers behind that line."""
    caplog.set_level(logging.DEBUG)
    lines = [b"no header", b"Location: https://host/x?sig=hunter2", b"Set-Cookie: a=hunter2", b"", b"abc"]
    with trickling_server(HEAD + b"\r\n".join(lines)) as url:
        client = open_client(url.split("/")[2], secure=False, timeout_s=(10, 60))
        client.open("GET", f"{url}?token=hunter2", "ask").close()
        client.close()
    assert "Failed to parse headers (url=http://127.0.0.1" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("endless", [b"1" * 65536, b"1;" + b"x" * 65536, b"0\r\nA: " + b"x" * 65536])
def test_the_size_of_a_chunk_that_never_ends_is_given_up(endless):
    """Some releases of urllib3 read the whole line, however long it is."""
    with trickling_server(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + endless * 1000) as url:
        tracemalloc.start()
        with pytest.raises(RegistryError), ask(url) as response:
            http_answers.read_body(response, "ask", 10**8)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 2**24 + 66_000_000, "of which the server has most"


LOCATIONS = [
    "http://{evil}\\@{own}/v2/x",
    "http://{evil}\\.{own}/v2/x",
    "/\\{evil}/v2/x",
    "http://user:password@{own}/v2/x",
    "http://{evil}\t@{own}/v2/x",
    "http://{own} @{evil}/v2/x",
    "http://[bad/x",
    "http://{own}:port/x",
    "http://{own}99999/x",
    "http://:5000/x",
    "file:///etc/passwd",
    "\xff\xfe",
]


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("header", ["Location", "WWW-Authenticate"])
def test_an_address_that_two_parsers_read_as_two_hosts_is_refused(location, header, tmp_path, monkeypatch):
    with serve() as own, serve() as evil:
        hosts = {"own": own.url[7:], "evil": evil.url[7:]}
        login = {"auths": {hosts["own"]: {"auth": base64.b64encode(b"me:secret").decode()}}}
        (tmp_path / "config.json").write_text(json.dumps(login))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        own.files["/v2/"] = b""
        url = location.format(**hosts)
        challenge = {"WWW-Authenticate": f'Bearer realm="{url}"' if header != "Location" else "Basic"}
        own.script = [send_status(401, **challenge), send_status(307, Location=url)]
        with pytest.raises(RegistryError):
            ask(own.url).close()
        assert evil.requests == [], "with or without credentials"


def ask_mlflow(url, folder):
    from ortprep.registry.backends.mlflow_server import MlflowServer

    MlflowServer(f"mlflow+{url}").call("GET", "experiments/get-by-name")


def ask_oci(url, folder):
    ask(url).close()


def ask_web(url, folder):
    fetch_file(WebFile(f"{url}/v2/"), folder / "got")


@pytest.mark.parametrize("fetch", [ask_oci, ask_mlflow, ask_web])
def test_the_body_of_a_redirect_is_not_unpacked(fetch, tmp_path):
    bomb = gzip.compress(bytes(2**22)) * 64

    def redirect(handler, server, content):
        handler.send_response(307)
        for name, value in {"Location": handler.path, "Content-Encoding": "gzip"}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(bomb)))
        handler.end_headers()
        with suppress(OSError):  # nobody reads it
            handler.wfile.write(bomb)

    with serve() as server:
        server.files |= {"/v2/": b"", "/api/2.0/mlflow/experiments/get-by-name": b""}
        server.script = [redirect] * 20
        tracemalloc.start()
        with pytest.raises(PipelineError, match=r"too many redirects|got status 307"):
            fetch(server.url, tmp_path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(server.requests) <= http_answers.MAX_REDIRECTS + 1
    assert peak_bytes < 2**24, "it would be 2**28 bytes"


@pytest.mark.parametrize("fetch", [ask_oci, ask_web])
def test_no_cookie_of_a_server_is_kept(fetch, tmp_path):
    """Each answer may bring 6 MB of them, which no limit on bodies counts."""
    with serve() as server:
        server.files["/v2/"] = b""
        cookie = {"Set-Cookie": f"a={'x' * 4000}; Path=/", "Location": "/v2/"}
        server.script = [send_status(307, **cookie), send_status(307, **cookie)]
        fetch(server.url, tmp_path)
        assert len(server.requests) == 3
        assert not any("Cookie" in headers for _, headers in server.requests)


@pytest.mark.parametrize("size", [b"1e999", b"-1e999", b"NaN", b'"' + b"9" * 5000 + b'"'])
def test_a_size_that_is_no_number_of_bytes_is_an_error_of_the_registry(size):
    with serve() as server:
        listing = b'{"files": [{"path": "x", "is_dir": false, "file_size": %s}]}' % size
        server.files["/api/2.0/mlflow-artifacts/artifacts"] = listing
        artifacts = ProxiedArtifacts("mlflow-artifacts:/1/x", MlflowServer(f"mlflow+{server.url}"))
        with pytest.raises(RegistryError, match="expected a list of files"):
            artifacts.find("bundle")


@pytest.mark.parametrize(
    "wait", ["9" * 5000, "Fri, 31 Dec 99999 23:59:59 GMT", "Fri, 31 Dec 999999999999999999 23:59:59 GMT", "?"]
)
def test_a_time_to_wait_that_is_none_counts_as_none(wait):
    with serve() as server:
        server.files["/v2/"] = b""
        server.script = [send_status(503, **{"Retry-After": wait})]
        with ask(server.url) as response:
            error = http_answers.status_error(response, "ask")
    assert isinstance(error, RegistryUnavailableError)
    assert error.retry_after_s == 0


@pytest.mark.parametrize("seconds", ["0", "9" * 19, "-1", "soon"])
def test_a_timeout_that_is_none_is_refused(monkeypatch, seconds):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", seconds)
    with pytest.raises(RegistryError, match="bad MLFLOW_HTTP_REQUEST_TIMEOUT"):
        MlflowServer("mlflow+http://127.0.0.1:9").call("GET", "experiments/get-by-name", experiment_name="x")
