"""Answers of registries have limits, whatever the server does."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import threading
import tracemalloc
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import (
    AccessDeniedError,
    IntegrityError,
    NotPublishedError,
    PipelineError,
    RegistryError,
    RegistryUnavailableError,
)
from ortprep.registry.backends.mlflow_server import MlflowServer, ProxiedArtifacts
from ortprep.registry.backends.oci_auth import OciClient
from ortprep.transport import http_answers, transfer
from ortprep.transport.time_limit import limit_time
from ortprep.transport.transfer import BLOCK_BYTES, Download, download
from tests.fakes import send_cut, send_range, send_status, send_whole, serve, trickling_server

HEAD = b"HTTP/1.1 200 OK\r\n"
FIXED = HEAD + b"Content-Length: 9999999\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;"


def end_of(call):
    """What a call raises within half a minute, None if nothing."""
    raised = []

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
    client = OciClient(host, secure=False, timeout_s=(10, 60))
    return client.open("GET", client.base, "ask", expected=(200, 503), follows=True)


@pytest.mark.attack
def test_a_document_is_read_up_to_its_limit():
    with serve() as server:
        server.files["/v2/"] = bytes(2**24)
        tracemalloc.start()
        with ask(server.url) as response, pytest.raises(RegistryError, match="at most 1000 bytes, got more"):
            http_answers.read_body(response, "ask", 1000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 2**22


@pytest.mark.attack
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


@pytest.mark.attack
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


@pytest.mark.attack
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
def test_a_request_that_never_ends_is_given_up_and_leaves_no_thread(monkeypatch, before, endless, first):
    """A process that lives on would have one more after every look at such a registry."""
    monkeypatch.setattr(http_answers, "ANSWER_TIMEOUT_S", 0.3)
    is_tls = before[:1] == b"\x16"
    if is_tls and first:
        pytest.skip("a connection that is kept has shaken hands")

    def read():
        http_answers.read_body(client.open("GET", client.base, "ask"), "ask", 10**8)

    with trickling_server(before, endless, first=first) as url:
        client = OciClient(url.split("/")[2], secure=is_tls, timeout_s=(10, 60))
        if first:
            read()
        assert "nothing in time" in str(end_of(read))
        assert not any(thread.name == "ortprep-network" for thread in threading.enumerate())
        client.close()


@pytest.mark.attack
def test_a_header_that_is_none_brings_no_secret_into_the_log(caplog):
    """`urllib3` logs the URL of such an answer, and all headers behind that line."""
    caplog.set_level(logging.DEBUG)
    lines = [b"no header", b"Location: https://host/x?sig=hunter2", b"Set-Cookie: a=hunter2", b"", b"abc"]
    with trickling_server(HEAD + b"\r\n".join(lines)) as url:
        client = OciClient(url.split("/")[2], secure=False, timeout_s=(10, 60))
        client.open("GET", f"{url}?token=hunter2", "ask").close()
        client.close()
    assert "Failed to parse headers (url=http://127.0.0.1" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.attack
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


@pytest.mark.attack
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


def ask_mlflow(url):
    from ortprep.registry.backends.mlflow_server import MlflowServer

    MlflowServer(f"mlflow+{url}").call("GET", "experiments/get-by-name")


def ask_oci(url):
    ask(url).close()


@pytest.mark.attack
@pytest.mark.parametrize("fetch", [ask_oci, ask_mlflow])
def test_the_body_of_a_redirect_is_not_unpacked(fetch):
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
            fetch(server.url)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(server.requests) <= http_answers.MAX_REDIRECTS + 1
    assert peak_bytes < 2**24, "it would be 2**28 bytes"


@pytest.mark.attack
def test_no_cookie_of_a_server_is_kept():
    """Each answer may bring 6 MB of them, which no limit on bodies counts."""
    with serve() as server:
        server.files["/v2/"] = b""
        cookie = {"Set-Cookie": f"a={'x' * 4000}; Path=/", "Location": "/v2/"}
        server.script = [send_status(307, **cookie), send_status(307, **cookie)]
        ask_oci(server.url)
        assert len(server.requests) == 3
        assert not any("Cookie" in headers for _, headers in server.requests)


@pytest.mark.attack
def test_cookies_are_not_parsed():
    """Of each two bytes of `Set-Cookie2`, the standard library makes an object, and of 6 MB 2.3 GB."""

    def send_cookies(handler, server, content):
        handler.send_response(200)
        for name, value in [("Set-Cookie", "a=b"), *[("Set-Cookie2", "a," * 30_000)] * 20]:
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with serve() as server:
        server.files["/v2/"], server.script = b"", [send_cookies]
        tracemalloc.start()
        ask_oci(server.url)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 2**24, "it would be 2**28 bytes"


@pytest.mark.attack
def test_headers_of_megabytes_are_refused():
    with serve() as server:
        links = {f"Link{number}": "<," * 30_000 for number in range(9)}
        server.files["/v2/"], server.script = b"", [send_status(200, **links)] * 20
        with pytest.raises(PipelineError, match="expected at most 262144 bytes of headers"):
            ask_oci(server.url)


@pytest.mark.attack
@pytest.mark.parametrize("size", [b"1e999", b"-1e999", b"NaN", b'"' + b"9" * 5000 + b'"'])
def test_a_size_that_is_no_number_of_bytes_is_an_error_of_the_registry(size):
    with serve() as server:
        listing = b'{"files": [{"path": "x", "is_dir": false, "file_size": %s}]}' % size
        server.files["/api/2.0/mlflow-artifacts/artifacts"] = listing
        artifacts = ProxiedArtifacts("mlflow-artifacts:/1/x", MlflowServer(f"mlflow+{server.url}"))
        with pytest.raises(RegistryError, match="expected a list of files"):
            artifacts.find("bundle")


@pytest.mark.attack
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


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AccessDeniedError),
        (403, AccessDeniedError),
        (404, NotPublishedError),
        (410, NotPublishedError),
        (400, RegistryError),
        (409, RegistryError),
        (429, RegistryUnavailableError),
        (500, RegistryUnavailableError),
        (503, RegistryUnavailableError),
    ],
)
def test_every_status_has_its_error(status, kind):
    with serve() as server:
        server.files["/v2/"], server.script = b"", [send_status(status)]
        client = OciClient(server.url[7:], secure=False, timeout_s=(10, 60))
        with pytest.raises(kind, match=f"got status {status}") as caught:
            client.open("GET", client.base, "ask")
        client.close()
    assert type(caught.value) is kind


CONTENT = bytes(range(256)) * 5000


@pytest.mark.parametrize(
    ("answer", "start", "error"),
    [
        (send_range, 70_000, None),
        (send_whole, 0, None),
        (send_status(206, **{"Content-Range": "bytes 1-2/3"}), None, "expected bytes from 70000 on"),
        (send_cut(300_000), 0, "expected 1280000 bytes, got 300000"),
    ],
)
def test_a_file_is_read_from_an_offset_or_whole_and_a_cut_is_seen(answer, start, error):
    got = []
    with serve() as server:
        server.files["/v2/"], server.script = CONTENT, [answer]
        client = OciClient(server.url[7:], secure=False, timeout_s=(10, 60))

        def ask_again(headers):
            return client.open("GET", client.base, "ask", expected=(200, 206), headers=headers)

        with (
            nullcontext() if error is None else pytest.raises(RegistryError, match=error),
            http_answers.open_file(ask_again, "ask", 70_000) as opened,
        ):
            assert opened.start == start
            got.extend(opened.blocks)
        client.close()
    end = None if error is None else 300_000
    assert b"".join(got) == (b"" if start is None else CONTENT[start:end])


# -- A file arrives whole and unmixed, or not at all, whatever its source does

SIZE = 5000


@pytest.fixture(autouse=True, scope="module")
def _no_pause():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "FIRST_PAUSE_S", 0.0)
        yield


@dataclass
class Answer:
    """What a source does when it is asked.

    Attributes:
        cut_at: Where it breaks off; None for never.
        whole: Whether it begins at the beginning, whatever is asked.
    """

    cut_at: int | None = None
    whole: bool = False


@dataclass
class Source:
    """A source with a script; after it, it does what it is asked."""

    answers: list[Answer]
    unit: int = 1
    offsets: list[int] = field(default_factory=list)

    @property
    def content(self):
        return bytes([1]) * self.unit * SIZE

    @property
    def entry(self):
        return FileEntry("m", len(self.content), digest_bytes(self.content))

    @contextmanager
    def open(self, offset):
        self.offsets.append(offset)
        answer = self.answers.pop(0) if self.answers else Answer()
        start = 0 if answer.whole else offset
        yield Download(self._blocks(start // self.unit, answer.cut_at), start)

    def _blocks(self, start, cut_at):
        end = SIZE if cut_at is None else max(start, cut_at)
        for at in range(start, end, 1000):
            yield self.content[at * self.unit : min(at + 1000, end) * self.unit]
        if cut_at is not None:
            raise RegistryUnavailableError("cut")


ANSWERS = st.builds(Answer, cut_at=st.none() | st.integers(0, SIZE), whole=st.booleans())


@given(st.lists(ANSWERS, max_size=5), st.integers(0, SIZE + 1))
def test_what_arrives_is_the_file_and_what_an_earlier_process_left_counts(answers, left):
    source = Source(answers)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "ATTEMPTS", 9)
        path = Path(folder) / "got"
        path.write_bytes(source.content[:left].ljust(left, b"?"))
        download(source.open, path, source.entry)
        assert path.read_bytes() == source.content
    assert source.offsets[:1] == ([] if left == SIZE else [left if left < SIZE else 0])


def test_a_download_ends_after_tries_that_bring_nothing_and_only_then(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "ATTEMPTS", 2)
    nothing = Source([Answer(0)] * 9)
    with pytest.raises(RegistryUnavailableError, match="cut"):
        download(nothing.open, tmp_path / "got", nothing.entry)
    assert len(nothing.offsets) == 2
    block = Source([Answer(at) for at in range(1000, SIZE, 1000)], unit=BLOCK_BYTES // 1000 + 1)
    download(block.open, tmp_path / "got", block.entry)
    assert len(block.offsets) == 5


def test_other_bytes_than_recorded_are_refused(tmp_path):
    source = Source([])
    for content, message in ((b"0" * SIZE, "other bytes"), (source.content[:-1], "too many bytes")):
        expected = FileEntry("m", len(content), digest_bytes(content))
        (tmp_path / "got").unlink(missing_ok=True)
        with pytest.raises(IntegrityError, match=message):
            download(source.open, tmp_path / "got", expected)


@pytest.mark.attack
def test_a_download_is_limited_in_time(tmp_path):
    with (
        limit_time(-1, RegistryError("took too long")),
        pytest.raises(RegistryError, match="took too long") as caught,
    ):
        download(Source([]).open, tmp_path / "got", Source([]).entry)
    assert not isinstance(caught.value, RegistryUnavailableError)


def test_a_full_disk_is_not_taken_for_a_bad_connection():
    source = Source([])
    with pytest.raises(OSError, match="No space left"):
        download(source.open, Path("/dev/full"), source.entry)
    assert source.offsets == [0]
