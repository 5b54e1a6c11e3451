"""A file arrives whole and unmixed, or not at all, whatever its server does."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import numpy as np
import pytest

from ortprep.bundle.digest import digest_bytes
from ortprep.errors import MissingExtraError, SourceError
from ortprep.stages.fetch import transfer
from ortprep.stages.fetch.origins import LocalFile, beside, origin_of
from ortprep.stages.fetch.transfer import (
    BLOCK_BYTES,
    DEFAULT_TIMEOUT_S,
    TIMEOUT_VARIABLE,
    RetryPolicy,
    TransferResult,
    fetch_file,
    read_timeout_s,
)
from ortprep.stages.fetch.web_file import check_redirect
from tests.fakes import (
    FileServer,
    send_cut,
    send_slowly,
    send_status,
    send_whole,
    serve,
    trickling_server,
    wait_for_a_tick,
)

CONTENT = np.random.default_rng(0).bytes(3 * BLOCK_BYTES + 17)
OTHER = np.random.default_rng(1).bytes(3 * BLOCK_BYTES + 17)
RETRY = RetryPolicy(attempts=3, retry_delay_s=0.001)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with serve() as running:
        running.files["/m.onnx"] = CONTENT
        yield running


def fetch(server: FileServer, folder: Path, path: str = "/m.onnx") -> TransferResult:
    return fetch_file(origin_of(server.url + path), folder / "got", retry=RETRY)


def test_a_whole_file_arrives_with_its_digest(server: FileServer, tmp_path: Path) -> None:
    assert fetch(server, tmp_path) == TransferResult(len(CONTENT), digest_bytes(CONTENT))
    assert (tmp_path / "got").read_bytes() == CONTENT


def test_progress_is_told_after_every_block_of_a_file_whose_size_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "m.onnx"
    told: list[float] = []
    source.write_bytes(bytes(4 * BLOCK_BYTES))
    fetch_file(LocalFile(source, "m.onnx"), tmp_path / "got", progress=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]


def test_a_slow_server_is_waited_for(server: FileServer, tmp_path: Path) -> None:
    server.script = [send_slowly]
    assert fetch(server, tmp_path).sha256 == digest_bytes(CONTENT)


def test_a_cut_transfer_goes_on_where_it_was_cut(server: FileServer, tmp_path: Path) -> None:
    cut = 2 * BLOCK_BYTES
    server.script = [send_cut(cut)]
    assert fetch(server, tmp_path).sha256 == digest_bytes(CONTENT)
    assert server.requests[1][1]["Range"] == f"bytes={cut}-"
    assert server.sent_bytes == len(CONTENT)


def test_a_file_that_changed_while_it_was_cut_starts_again(server: FileServer, tmp_path: Path) -> None:
    def change(*request: object) -> None:
        send_cut(2 * BLOCK_BYTES)(*request)  # type: ignore[arg-type]
        server.files["/m.onnx"], server.etag = OTHER, '"two"'

    server.script = [change]
    assert fetch(server, tmp_path).sha256 == digest_bytes(OTHER)
    assert (tmp_path / "got").read_bytes() == OTHER


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_a_file_without_a_strong_version_starts_again(
    server: FileServer, tmp_path: Path, etag: str | None
) -> None:
    server.etag = etag
    server.script = [send_cut(2 * BLOCK_BYTES)]
    assert fetch(server, tmp_path).sha256 == digest_bytes(CONTENT)
    assert "Range" not in server.requests[1][1]


def test_a_server_without_ranges_sends_it_all_again(server: FileServer, tmp_path: Path) -> None:
    server.script = [send_cut(2 * BLOCK_BYTES), send_whole]
    assert fetch(server, tmp_path).sha256 == digest_bytes(CONTENT)
    assert (tmp_path / "got").read_bytes() == CONTENT


def test_a_range_that_is_refused_is_not_asked_for_again(server: FileServer, tmp_path: Path) -> None:
    server.script = [send_cut(2 * BLOCK_BYTES), send_status(416)]
    assert fetch(server, tmp_path).sha256 == digest_bytes(CONTENT)
    assert "Range" not in server.requests[2][1]


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408])
def test_a_passing_failure_is_tried_again(server: FileServer, tmp_path: Path, status: int) -> None:
    server.script = [send_status(status), send_status(status)]
    assert fetch(server, tmp_path).sha256 == digest_bytes(CONTENT)


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_lasting_failure_is_told_at_once(server: FileServer, tmp_path: Path, status: int) -> None:
    server.script = [send_status(status)]
    with pytest.raises(SourceError, match=f"expected HTTP 200, got HTTP {status}"):
        fetch(server, tmp_path)
    assert len(server.requests) == 1


def test_patience_ends(server: FileServer, tmp_path: Path) -> None:
    server.script = [send_status(503)] * 10
    with pytest.raises(SourceError, match="gave up after 3 tries"):
        fetch(server, tmp_path)
    assert len(server.requests) == 3


def test_a_server_that_always_ends_early_is_given_up(server: FileServer, tmp_path: Path) -> None:
    server.script = [send_cut(100)] * 10
    with pytest.raises(SourceError, match=rf"expected {len(CONTENT)} bytes, got 100"):
        fetch(server, tmp_path)


def test_many_cuts_do_not_matter_as_long_as_each_try_gets_on(server: FileServer, tmp_path: Path) -> None:
    def cut_range(handler: object, running: FileServer, content: bytes) -> None:
        start = int(handler.headers["Range"].removeprefix("bytes=").rstrip("-"))  # type: ignore[attr-defined]
        handler.send_response(206)  # type: ignore[attr-defined]
        for name, text in (
            ("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}"),
            ("Content-Length", str(len(content) - start)),
            ("ETag", '"one"'),
        ):
            handler.send_header(name, text)  # type: ignore[attr-defined]
        handler.end_headers()  # type: ignore[attr-defined]
        handler.body(content[start : start + BLOCK_BYTES])  # type: ignore[attr-defined]
        handler.close_connection = True  # type: ignore[attr-defined]

    server.files["/m.onnx"] = CONTENT * 2
    server.script = [send_cut(BLOCK_BYTES), *[cut_range] * 5]
    assert fetch(server, tmp_path).sha256 == digest_bytes(CONTENT * 2)
    assert server.sent_bytes == 2 * len(CONTENT)


@pytest.mark.attack
def test_a_redirect_is_followed_without_credentials(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    server.files["/old.onnx"] = b""
    server.script = [send_status(302, Location=f"{server.url}/m.onnx")]
    assert fetch(server, tmp_path, "/old.onnx").sha256 == digest_bytes(CONTENT)
    assert "Authorization" in server.requests[0][1]
    assert "Authorization" not in server.requests[1][1]


@pytest.mark.attack
def test_a_redirect_to_a_local_file_is_refused(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    server.script = [send_status(302, Location=f"file://{tmp_path / 'secret'}")]
    with pytest.raises(SourceError, match="got a redirect to file://"):
        fetch(server, tmp_path)


@pytest.mark.attack
def test_a_redirect_from_https_to_http_is_refused() -> None:
    with pytest.raises(
        SourceError, match=r"expected https, got a redirect to http://elsewhere/m\.onnx"
    ) as caught:
        check_redirect("https://host/m.onnx?token=secret", "http://elsewhere/m.onnx")
    assert "secret" not in str(caught.value)
    assert check_redirect("https://host/m.onnx", "https://elsewhere/my m.onnx").endswith("/my%20m.onnx")


@pytest.mark.attack
@pytest.mark.parametrize(
    ("limits", "message"), [({"max_bytes": BLOCK_BYTES}, "got more"), ({"timeout_s": 0.0}, "took too long")]
)
def test_a_download_is_limited_in_size_and_time(
    server: FileServer, tmp_path: Path, limits: dict[str, float], message: str
) -> None:
    retry = dataclasses.replace(RETRY, **limits)  # type: ignore[arg-type]
    server.files["/m.onnx"] = CONTENT * 2
    with pytest.raises(SourceError, match=message):
        fetch_file(origin_of(server.url + "/m.onnx"), tmp_path / "got", retry=retry)


def test_the_time_limit_of_a_whole_file_comes_from_the_environment(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/m.onnx"] = CONTENT
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0")
    with pytest.raises(SourceError, match="took too long") as raised:
        fetch_file(origin_of(server.url + "/m.onnx"), tmp_path / "got", retry=RETRY)
    assert TIMEOUT_VARIABLE in str(raised.value.hint)
    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    with pytest.raises(SourceError, match=f"bad {TIMEOUT_VARIABLE}: 'soon'"):
        fetch_file(origin_of(server.url + "/m.onnx"), tmp_path / "got", retry=RETRY)
    monkeypatch.delenv(TIMEOUT_VARIABLE)
    assert read_timeout_s() == DEFAULT_TIMEOUT_S


@pytest.mark.attack
@pytest.mark.parametrize(
    "before", [b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: "]
)
def test_a_server_that_sends_a_byte_at_a_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(transfer, "STALL_TIMEOUT_S", 0.2)
    results: list[BaseException] = []

    def fetch() -> None:
        try:
            fetch_file(origin_of(url), tmp_path / "got", retry=RETRY)
        except SourceError as error:
            results.append(error)

    with trickling_server(before) as url:
        thread = threading.Thread(target=fetch, daemon=True)
        thread.start()
        thread.join(30)
    assert [type(result) for result in results] == [SourceError], "it does not wait for ever"
    assert "gave up after 3 tries" in str(results[0])


@pytest.mark.attack
@pytest.mark.parametrize(
    "head", ["200 OK\r\nContent-Length: {}", "206 OK\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/{}"]
)
def test_a_size_of_thousands_of_digits_is_refused(tmp_path: Path, head: str) -> None:
    before = f"HTTP/1.1 {head.format('1' * 5000)}\r\n\r\n".encode()
    with trickling_server(before) as url, pytest.raises(SourceError):
        fetch_file(origin_of(url), tmp_path / "got", retry=RETRY)


def test_no_server_is_told_after_a_few_tries(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no connection"):
        fetch_file(origin_of("http://127.0.0.1:9/m.onnx"), tmp_path / "got", retry=RETRY)


@pytest.mark.attack
def test_credentials_never_show(server: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for url in (server.url, server.url.replace("//", "//me:secret@")):
        with pytest.raises(SourceError) as caught:
            fetch_file(origin_of(f"{url}/absent.onnx?token=secret"), tmp_path / "got", retry=RETRY)
        assert "secret" not in str(caught.value) + caplog.text
    assert "/absent.onnx" in caplog.text
    assert len(server.requests) == 1, "a user in a URL is refused"


@pytest.mark.parametrize("url", ["http:///m.onnx", "http://host:port/m.onnx", "http://[::1/m.onnx"])
def test_what_is_no_url_is_told(tmp_path: Path, url: str) -> None:
    with pytest.raises(SourceError, match="not a URL"):
        fetch_file(origin_of(url), tmp_path / "got", retry=RETRY)


def test_a_full_disk_is_not_taken_for_a_bad_connection(server: FileServer) -> None:
    with pytest.raises(OSError, match="No space left"):
        fetch_file(origin_of(f"{server.url}/m.onnx"), Path("/dev/full"), retry=RETRY)
    assert len(server.requests) == 1


@pytest.fixture
def memory(server: FileServer) -> Iterator[str]:
    folder = f"memory://{uuid4().hex}"
    with fsspec.open(f"{folder}/m.onnx", "wb") as file:
        file.write(CONTENT)
    yield folder
    fsspec.filesystem("memory").rm(folder, recursive=True)


def test_any_installed_filesystem_is_a_source(memory: str, tmp_path: Path) -> None:
    received = fetch_file(origin_of(f"{memory}/m.onnx"), tmp_path / "got", retry=RETRY)
    assert received == TransferResult(len(CONTENT), digest_bytes(CONTENT))


@pytest.mark.parametrize("name", ["absent.onnx", ""])
def test_a_filesystem_without_the_file_is_told(memory: str, tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match="expected a file, got"):
        fetch_file(origin_of(f"{memory}/{name}"), tmp_path / "got", retry=RETRY)


def test_a_cut_on_a_filesystem_is_resumed_from_its_offset(memory: str, tmp_path: Path) -> None:
    origin = origin_of(f"{memory}/m.onnx")
    with origin.open(0, None) as first:
        version = first.version
    with origin.open(BLOCK_BYTES, version) as second:
        assert second.start == BLOCK_BYTES
        assert second.read(10) == CONTENT[BLOCK_BYTES : BLOCK_BYTES + 10]
    with fsspec.open(f"{memory}/m.onnx", "wb") as file:
        file.write(OTHER)
    with origin.open(BLOCK_BYTES, version) as third:
        assert third.start == 0


def test_a_missing_filesystem_names_its_package(tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"no filesystem for dropbox(.|\n)*dropboxdrivefs"):
        fetch_file(origin_of("dropbox://folder/m.onnx"), tmp_path / "got", retry=RETRY)


def test_an_unknown_protocol_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="Protocol not known: nosuch"):
        fetch_file(origin_of("nosuch://host/m.onnx"), tmp_path / "got", retry=RETRY)


def test_a_local_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(CONTENT)

    def read_a_changing_file() -> None:
        with LocalFile(path, str(path)).open(0, None) as opened:
            opened.read(1)
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
def test_external_data_lies_beside_its_model(url: str, location: str, expected: str) -> None:
    assert beside(url, location) == expected
