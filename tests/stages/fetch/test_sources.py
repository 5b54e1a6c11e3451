"""Files of a web server, a store and a disk: whole, without a word of the credentials, or a clear refusal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import fsspec
import numpy as np
import pytest

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import RegistryError, SourceError
from ortprep.stages.fetch import sources
from ortprep.stages.fetch.sources import (
    TIMEOUT_VARIABLE,
    LocalFile,
    StoreObject,
    check_redirect,
    fetch_file,
    find_login,
    source_of,
)
from ortprep.transport import http_answers, transfer
from ortprep.transport.transfer import BLOCK_BYTES, Download
from tests.fakes import (
    FileServer,
    send_cut,
    send_status,
    serve,
    trickling_server,
    wait_for_a_tick,
)

CONTENT = np.random.default_rng(0).bytes(3 * BLOCK_BYTES + 17)
OTHER = np.random.default_rng(1).bytes(3 * BLOCK_BYTES + 17)
CUT = 2 * BLOCK_BYTES


@pytest.fixture(autouse=True)
def _own_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(sources, "ATTEMPTS", 3)


@pytest.fixture
def server():
    with serve() as running:
        running.files["/m.onnx"] = CONTENT
        yield running


def fetch(server: FileServer, folder: Path, path: str = "/m.onnx", *, sha256: str | None = None) -> FileEntry:
    return fetch_file(source_of(server.url + path), folder / "got", sha256=sha256)


def test_a_cut_transfer_goes_on_where_the_digest_is_known_and_else_begins_again(server, tmp_path):
    digest = digest_bytes(CONTENT)
    for sha256, sent_bytes in ((digest, len(CONTENT)), (None, CUT + len(CONTENT))):
        server.sent_bytes, server.script = 0, [send_cut(CUT)]
        assert fetch(server, tmp_path, sha256=sha256).sha256 == digest
        assert server.requests[-1][1].get("Range") == (f"bytes={CUT}-" if sha256 else None)
        assert server.sent_bytes == sent_bytes


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_lasting_failure_is_told_at_once(server, tmp_path, status):
    server.script = [send_status(status)]
    with pytest.raises(SourceError, match=f"cannot fetch: .*\n  expected success, got status {status}"):
        fetch(server, tmp_path)
    assert len(server.requests) == 1


@pytest.mark.attack
def test_a_login_is_sent_to_the_host_that_has_it_and_with_tls_alone(tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine own login me password secret\ndefault login all password any\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert find_login("https://own:8443/m.onnx") == ("me", "secret")
    for url in ("http://own/m.onnx", "https://other/m.onnx", "https://default/m.onnx"):
        assert find_login(url) is None


@pytest.mark.attack
def test_a_redirect_is_followed_without_credentials(server, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "find_login", lambda _: ("me", "secret"))
    server.files["/old.onnx"] = b""
    server.script = [send_status(302, Location=f"{server.url}/m.onnx")]
    assert fetch(server, tmp_path, "/old.onnx").sha256 == digest_bytes(CONTENT)
    assert "Authorization" in server.requests[0][1]
    assert "Authorization" not in server.requests[1][1]


@pytest.mark.attack
def test_a_redirect_to_a_local_file_or_from_https_to_http_is_refused(server, tmp_path):
    server.script = [send_status(302, Location="file:///etc/hostname")]
    with pytest.raises(SourceError, match="got a redirect to file://"):
        fetch(server, tmp_path)
    expected = r"expected https, got a redirect to http://elsewhere/m\.onnx"
    with pytest.raises(RegistryError, match=expected) as caught:
        check_redirect("https://host/m.onnx?token=secret", "http://elsewhere/m.onnx")
    assert "secret" not in str(caught.value)
    assert check_redirect("https://host/m.onnx", "https://elsewhere/my m.onnx").endswith("/my%20m.onnx")


@pytest.mark.attack
def test_a_file_is_limited_in_size_and_in_time_by_the_environment(server, tmp_path, monkeypatch):
    source = source_of(f"{server.url}/m.onnx")
    with pytest.raises(SourceError, match="got more"):
        fetch_file(source, tmp_path / "got", max_bytes=BLOCK_BYTES)
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0")
    with pytest.raises(SourceError, match="took too long") as raised:
        fetch_file(source, tmp_path / "got")
    assert TIMEOUT_VARIABLE in str(raised.value.hint)
    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    with pytest.raises(SourceError, match=f"bad {TIMEOUT_VARIABLE}: 'soon'"):
        fetch_file(source, tmp_path / "got")


@pytest.mark.attack
@pytest.mark.parametrize(
    "before", [b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: "]
)
def test_a_server_that_sends_a_byte_at_a_time_is_given_up(tmp_path, monkeypatch, before):
    monkeypatch.setattr(http_answers, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_answers, "BLOCK_TIMEOUT_S", 0.2)
    results: list[BaseException] = []

    def fetch() -> None:
        try:
            fetch_file(source_of(url), tmp_path / "got")
        except SourceError as error:
            results.append(error)

    with trickling_server(before) as url:
        thread = threading.Thread(target=fetch, daemon=True)
        thread.start()
        thread.join(30)
    assert [type(result) for result in results] == [SourceError], "it does not wait for ever"
    assert "nothing in time" in str(results[0])


@pytest.mark.attack
@pytest.mark.parametrize(
    "head", ["200 OK\r\nContent-Length: {}", "206 OK\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/{}"]
)
def test_a_size_of_thousands_of_digits_is_refused(tmp_path, head):
    before = f"HTTP/1.1 {head.format('1' * 5000)}\r\n\r\n".encode()
    with trickling_server(before) as url, pytest.raises(SourceError, match="expected a size"):
        fetch_file(source_of(url), tmp_path / "got")


@pytest.mark.attack
def test_credentials_never_show(server, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    for url in (server.url, server.url.replace("//", "//me:secret@")):
        with pytest.raises(SourceError) as caught:
            fetch_file(source_of(f"{url}/absent.onnx?token=secret"), tmp_path / "got")
        assert "secret" not in str(caught.value) + caplog.text
    assert "/absent.onnx" in caplog.text
    assert len(server.requests) == 1, "a user in a URL is refused"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http:///m.onnx", "expected a usable URL"),
        ("http://host:port/m.onnx", "expected a usable URL"),
        ("http://[::1/m.onnx", "expected a usable URL"),
        ("http://127.0.0.1:9/m.onnx", "Connection refused"),
        ("nosuch://host/m.onnx", "not a source: nosuch://host"),
    ],
)
def test_what_leads_to_no_server_is_told(tmp_path, url, message):
    with pytest.raises(SourceError, match=message):
        fetch_file(source_of(url), tmp_path / "got")


@pytest.fixture
def memory():
    folder = f"memory://{uuid4().hex}"
    with fsspec.open(f"{folder}/m.onnx", "wb") as file:
        file.write(CONTENT)
    yield folder
    fsspec.filesystem("memory").rm(folder, recursive=True)


def test_any_installed_filesystem_is_a_source(memory, tmp_path):
    source = source_of(f"{memory}/m.onnx")
    assert fetch_file(source, tmp_path / "got") == FileEntry("got", len(CONTENT), digest_bytes(CONTENT))
    with source.open(BLOCK_BYTES) as opened:
        assert (opened.start, b"".join(opened.blocks)) == (BLOCK_BYTES, CONTENT[BLOCK_BYTES:])
        assert opened.size_bytes == len(CONTENT)
    for name in ("absent.onnx", ""):
        with pytest.raises(SourceError, match=r"not in the source|IsADirectoryError"):
            fetch_file(source_of(f"{memory}/{name}"), tmp_path / "got")


@pytest.mark.parametrize("sha256", [None, digest_bytes(OTHER)])
def test_a_file_of_a_store_that_changes_while_it_is_read_is_read_again(memory, tmp_path, sha256):
    """With a digest, the second try goes on after the old bytes; they do not fit, and it begins again."""

    class Changing(StoreObject):
        @contextmanager
        def open(self, offset: int) -> Iterator[Download]:
            with super().open(offset) as opened:
                yield opened
                if offset == 0 and store.cat_file(f"{memory}/m.onnx") != OTHER:
                    store.pipe_file(f"{memory}/m.onnx", OTHER)

    store, source = fsspec.filesystem("memory"), Changing(f"{memory}/m.onnx")
    got = fetch_file(source, tmp_path / "got", sha256=sha256)
    assert got.sha256 == digest_bytes(OTHER)


def test_a_local_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(CONTENT)

    def read_a_changing_file() -> None:
        with LocalFile(path).open(0) as opened:
            next(opened.blocks)
            wait_for_a_tick(path)
            path.write_bytes(OTHER)

    with pytest.raises(SourceError, match="changed while it was read"):
        read_a_changing_file()


@pytest.mark.parametrize(
    ("url", "location", "expected"),
    [
        ("https://h/a/m.onnx", "w.bin", "https://h/a/w.bin"),
        ("https://h/a/m.onnx?sig=1", "sub/w b.bin", "https://h/a/sub/w%20b.bin?sig=1"),
        ("https://h/m.onnx", "w", "https://h/w"),
        ("s3://bucket/a/m.onnx", "w b.bin", "s3://bucket/a/w b.bin"),
    ],
)
def test_external_data_lies_beside_its_model(url, location, expected):
    assert source_of(url).beside(location) == source_of(expected)
