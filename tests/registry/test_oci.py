"""The OCI backend against Debian's registry, with a proxy between them that does what networks do."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from pipeline.bundle.digest import digest_bytes
from pipeline.bundle.loader_config import FileEntry
from pipeline.errors import (
    AccessDeniedError,
    IntegrityError,
    NotPublishedError,
    RegistryError,
    RegistryUnavailableError,
)
from pipeline.registry.backends.oci import documents
from pipeline.registry.backends.oci.backend import OciBackend
from pipeline.registry.records import (
    AliasRecord,
    LabelRecord,
    PartRecord,
    PartVariant,
    Record,
    VersionRecord,
    encode_record,
    file_records,
    record_digest,
)
from pipeline.registry.state import State, fold
from tests.registry.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.registry.oci_server import PASSWORD, USER, OciServer, free_port, oci_server

MODEL = "tiny"
SOURCE = digest_bytes(b"source")
SPEC = digest_bytes(b"spec")
MANIFEST = documents.MANIFEST
INDEX = documents.INDEX
CHUNK_BYTES = 256 * 1024
BIG = bytes(range(256)) * 5000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OciServer]:
    with oci_server(tmp_path_factory.mktemp("oci")) as running:
        yield running


@pytest.fixture(scope="module")
def shared_proxy(server: OciServer) -> Iterator[FaultProxy]:
    with fault_proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def proxy(shared_proxy: FaultProxy) -> FaultProxy:
    shared_proxy.clear()
    return shared_proxy


_counts = iter(range(1000))


@pytest.fixture
def backend(proxy: FaultProxy) -> Iterator[OciBackend]:
    one = OciBackend(oci_url(proxy.url), read_timeout_s=10, chunk_bytes=CHUNK_BYTES)
    yield one
    one.close()


def oci_url(url: str) -> str:
    """Returns a prefix that no other test uses."""
    return f"oci+{url}/team-{next(_counts)}/models"


def repository(backend: OciBackend) -> str:
    return backend.url.partition("://")[2].partition("/")[2] + f"/{MODEL}"


def api(backend: OciBackend, path: str) -> str:
    return f"http://{backend.url.partition('://')[2].partition('/')[0]}/v2/{repository(backend)}/{path}"


def entry_of(path: str, data: bytes) -> FileEntry:
    return FileEntry(path, len(data), digest_bytes(data))


FILES = {
    "manifest.json": b"{}",
    "loader.json": b'{"a": 1}',
    "cpu-fp32/model.onnx": b"model" * 100,
    "cpu-int8/model.onnx": b"other" * 100,
    "gpu/model.onnx": b"third" * 100,
    "gpu/empty.bin": b"",
}


def part_of(files: dict[str, bytes], created_at: str = "2026-01-02T03:04:05Z") -> PartRecord:
    variants = (
        PartVariant("cpu-fp32", "cpu", "1.23.0", ("CPUExecutionProvider",), ""),
        PartVariant("cpu-int8", "cpu", "1.23.0", ("CPUExecutionProvider",), "Some CPU"),
        PartVariant("gpu", "cuda", "1.23.0", ("CUDAExecutionProvider", "CPUExecutionProvider"), "Some GPU"),
    )
    entries = tuple(entry_of(path, data) for path, data in files.items())
    return PartRecord(MODEL, SOURCE, SPEC, created_at, entries, variants)


def upload(backend: OciBackend, tmp_path: Path, data: bytes, path: str = "gpu/big.bin") -> list[int]:
    source = tmp_path / "source"
    source.write_bytes(data)
    reports: list[int] = []
    entry = entry_of(path, data)
    backend.upload_file(MODEL, part_of({path: data}), entry, source, reports.append)
    return reports


def download(backend: OciBackend, data: bytes, offset: int = 0, path: str = "gpu/big.bin") -> bytes:
    part = part_of({path: data})
    with backend.open_file(MODEL, part, part.files[0], offset) as blocks:
        return b"".join(bytes(block) for block in blocks)


def publish(backend: OciBackend, tmp_path: Path, *records: Record, part: PartRecord) -> State:
    source = tmp_path / "source"
    for path, data in FILES.items():
        source.write_bytes(data)
        backend.upload_file(MODEL, part, entry_of(path, data), source, lambda _: None)
    backend.finish_part(MODEL, part)
    for record in (part, *records):
        name, data = encode_record(record)
        backend.write_record(MODEL, name, data)
    state = fold(MODEL, file_records((part, *records)))
    backend.mirror(MODEL, state)
    return state


def published_records() -> tuple[PartRecord, VersionRecord, LabelRecord, AliasRecord]:
    part = part_of(FILES)
    version = VersionRecord(MODEL, SOURCE, SPEC, (record_digest(part),))
    digest = record_digest(version)
    label = LabelRecord("1.0", digest, "2026-01-02T03:04:06Z")
    alias = AliasRecord("prod", "promote", digest, 1, "2026-01-02T03:04:07Z")
    return part, version, label, alias


def some_record(text: str = "cpu", size_bytes: int = 0) -> Record:
    return AliasRecord("prod", "promote", SOURCE, 1, text, reason="x" * size_bytes)


# Records


@pytest.mark.parametrize("size_bytes", [0, 200_000, 3_000_000])
def test_a_record_comes_back_as_it_was_written(backend: OciBackend, size_bytes: int) -> None:
    name, data = encode_record(some_record(size_bytes=size_bytes))
    assert backend.list_records(MODEL) == ()
    backend.write_record(MODEL, name, data)
    backend.write_record(MODEL, name, data)
    assert backend.list_records(MODEL) == (name,)
    assert backend.read_record(MODEL, name) == data


def test_reading_a_small_record_takes_one_request(backend: OciBackend, proxy: FaultProxy) -> None:
    name, data = encode_record(some_record())
    backend.write_record(MODEL, name, data)
    proxy.clear()
    backend.read_record(MODEL, name)
    assert len(proxy.requests) == 1


def test_a_deleted_record_is_neither_listed_nor_read(backend: OciBackend) -> None:
    names = []
    for text in "ab":
        name, data = encode_record(some_record(text))
        backend.write_record(MODEL, name, data)
        names.append(name)
    backend.delete_record(MODEL, names[0])
    backend.delete_record(MODEL, names[0])
    assert backend.list_records(MODEL) == (names[1],)
    with pytest.raises(NotPublishedError):
        backend.read_record(MODEL, names[0])
    backend.delete_record(MODEL, names[1])
    assert backend.list_records(MODEL) == ()
    backend.write_record(MODEL, names[0], encode_record(some_record("a"))[1])
    assert backend.list_records(MODEL) == (names[0],)


def test_a_record_whose_manifest_was_spoilt_on_the_way_is_read_from_its_blob(
    backend: OciBackend, proxy: FaultProxy
) -> None:
    name, data = encode_record(some_record())
    backend.write_record(MODEL, name, data)
    other = json.loads(documents.record_document(name, data).data)
    other["layers"][0]["data"] = base64.b64encode(b"other").decode()
    proxy.faults.append(Fault("replace", method="GET", path="manifests", body=json.dumps(other).encode()))
    assert backend.read_record(MODEL, name) == data


def test_pages_of_tags_are_followed(backend: OciBackend, proxy: FaultProxy) -> None:
    name, data = encode_record(some_record())
    backend.write_record(MODEL, name, data)
    first, _ = encode_record(some_record("other"))
    page = json.dumps({"tags": [f"ortprep-{first}", "ortprep-unknown-1", "1.0"]}).encode()
    following = f'</v2/{repository(backend)}/tags/list?n=1&last=x>; rel="next"'
    proxy.faults.append(Fault("replace", path="tags/list", body=page, headers={"Link": following}))
    assert set(backend.list_records(MODEL)) == {name, first}
    assert proxy.requests[-1] == ("GET", f"/v2/{repository(backend)}/tags/list?n=1&last=x")


def test_pages_that_never_end_and_pages_elsewhere_are_refused(backend: OciBackend, proxy: FaultProxy) -> None:
    for following in (f"</v2/{repository(backend)}/tags/list?n=1>", "<http://192.0.2.1/v2/x>"):
        headers = {"Link": f'{following}; rel="next"'}
        proxy.faults[:] = [
            Fault("replace", path="tags/list", body=b'{"tags":[]}', times=2, status=200, headers=headers)
        ]
        with pytest.raises(RegistryError, match="bad next page"):
            backend.list_records(MODEL)


def test_models_are_repositories_with_records(backend: OciBackend, tmp_path: Path) -> None:
    assert backend.list_models() == ()
    name, data = encode_record(some_record())
    backend.write_record("b.model", name, data)
    backend.write_record("a-model", name, data)
    upload(backend, tmp_path, b"only a file")
    assert backend.list_models() == ("a-model", "b.model")


def test_a_registry_without_catalogue_says_so(backend: OciBackend, proxy: FaultProxy) -> None:
    for status in (404, 403, 405):
        proxy.faults[:] = [Fault("status", path="_catalog", status=status)]
        with pytest.raises(RegistryError, match="does not list its models"):
            backend.list_models()


@pytest.mark.parametrize("model", ["Upper", "a/b", "a..b", "-a", "x" * 250, "ä"])
def test_names_that_are_no_repositories_are_refused(backend: OciBackend, model: str) -> None:
    with pytest.raises(RegistryError, match="not a name for an OCI registry"):
        backend.list_records(model)


@pytest.mark.parametrize(
    "url",
    ["oci://", "oci://host name/x", "oci://host/Upper", "oci://host/a?b=c", "s3://host/x", "oci://h:x/y"],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(RegistryError):
        OciBackend(url)


def test_credentials_in_the_url_are_refused_and_not_repeated() -> None:
    for password in ("hunter2", "hunter2/x", "x@hunter2", "hunter2?x"):
        with pytest.raises(RegistryError, match=r"docker login registry\.example") as caught:
            OciBackend(f"oci://user:{password}@registry.example/models")
        assert "hunter2" not in str(caught.value)


# Files


def test_files_come_back_as_they_were_uploaded(backend: OciBackend, tmp_path: Path) -> None:
    for data in (b"", b"x", b"small" * 1000, BIG, BIG[: 2 * CHUNK_BYTES]):
        assert sum(upload(backend, tmp_path, data)) == len(data)
        assert download(backend, data) == data
        assert download(backend, data, len(data) // 2) == data[len(data) // 2 :]
        assert download(backend, data, len(data)) == b""


def test_only_what_is_missing_has_to_be_uploaded(backend: OciBackend, tmp_path: Path) -> None:
    part = part_of({"a": b"one", "b": b"two", "gpu/c": b"one", "gpu/d": b"two"})
    assert {entry.sha256 for entry in backend.find_missing(MODEL, part)} == {
        digest_bytes(b"one"),
        digest_bytes(b"two"),
    }
    upload(backend, tmp_path, b"one")
    assert [entry.sha256 for entry in backend.find_missing(MODEL, part)] == [digest_bytes(b"two")]


@pytest.mark.parametrize("data", [b"small", BIG])
def test_a_file_with_other_bytes_is_not_kept(backend: OciBackend, tmp_path: Path, data: bytes) -> None:
    source = tmp_path / "source"
    for wrong in (data[:-1], data + b"x", data[:-1] + b"#"):
        source.write_bytes(wrong)
        part = part_of({"a": data})
        with pytest.raises(IntegrityError):
            backend.upload_file(MODEL, part, part.files[0], source, lambda _: None)
        assert backend.find_missing(MODEL, part) == part.files
    assert requests.head(api(backend, f"blobs/{digest_bytes(data + b'x')}"), timeout=5).status_code == 404


def test_a_cut_upload_goes_on_where_it_stopped(
    backend: OciBackend, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.faults += [
        Fault("slow", method="PATCH", times=2),
        Fault("cut_request", method="PATCH", at_bytes=1000, forward=False),
        Fault("status", method="PATCH", status=503),
        Fault("cut_answer", method="PUT", path="uploads/"),
    ]
    reports = upload(backend, tmp_path, BIG)
    assert sum(reports) == len(BIG)
    assert min(reports) > 0
    assert proxy.received_bytes < len(BIG) + 2 * CHUNK_BYTES
    assert proxy.count("POST") == 1
    assert download(backend, BIG) == BIG


def test_an_upload_that_the_registry_lost_begins_again(
    backend: OciBackend, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.faults += [
        Fault("slow", method="PATCH", times=2),
        # What this registry has of a chunk when the connection breaks costs it the whole upload.
        Fault("cut_request", method="PATCH", at_bytes=1000),
    ]
    reports = upload(backend, tmp_path, BIG)
    assert min(reports) == -2 * CHUNK_BYTES
    assert sum(reports) == len(BIG)
    assert proxy.count("POST") == 2
    assert download(backend, BIG) == BIG


def test_an_upload_that_is_always_lost_fails(backend: OciBackend, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.faults.append(Fault("cut_request", method="PATCH", at_bytes=1000, times=1000))
    with pytest.raises(RegistryUnavailableError):
        upload(backend, tmp_path, BIG)
    part = part_of({"a": BIG})
    assert backend.find_missing(MODEL, part) == part.files


def test_bytes_changed_on_their_way_up_are_not_kept(
    backend: OciBackend, proxy: FaultProxy, tmp_path: Path
) -> None:
    data = b"one" * 100
    proxy.faults.append(Fault("status", method="PUT", path="uploads/", status=400))
    assert sum(upload(backend, tmp_path, data)) == len(data)
    assert download(backend, data) == data


def test_a_cut_download_can_go_on(backend: OciBackend, proxy: FaultProxy, tmp_path: Path) -> None:
    upload(backend, tmp_path, BIG)
    proxy.clear()
    proxy.faults.append(Fault("cut_answer", path="blobs/", at_bytes=1_100_000))
    part = part_of({"gpu/big.bin": BIG})
    got: list[bytes] = []
    with backend.open_file(MODEL, part, part.files[0], 0) as blocks, pytest.raises(RegistryUnavailableError):
        got.extend(blocks)
    first = b"".join(got)
    assert 0 < len(first) <= 1_100_000
    assert first + download(backend, BIG, len(first)) == BIG
    assert proxy.sent_bytes < len(BIG) + 200_000


def test_a_registry_that_knows_no_ranges_is_read_from_the_start(
    backend: OciBackend, proxy: FaultProxy, tmp_path: Path
) -> None:
    upload(backend, tmp_path, BIG)
    proxy.faults.append(Fault("replace", path="blobs/", status=200, body=BIG))
    assert download(backend, BIG, 70_000) == BIG[70_000:]
    proxy.faults.append(Fault("replace", path="blobs/", headers={"Content-Range": "bytes 1-2/3"}, status=206))
    with pytest.raises(RegistryError):
        download(backend, BIG, 70_000)


def test_a_file_that_does_not_end_is_given_up(backend: OciBackend, proxy: FaultProxy, tmp_path: Path) -> None:
    upload(backend, tmp_path, b"small")
    proxy.faults.append(Fault("endless", path="blobs/", at_bytes=2**30))
    with pytest.raises(IntegrityError, match="too many bytes"):
        download(backend, b"small")
    assert proxy.sent_bytes < 100_000_000


def test_a_file_too_short_is_an_unavailable_registry(
    backend: OciBackend, proxy: FaultProxy, tmp_path: Path
) -> None:
    upload(backend, tmp_path, b"small")
    proxy.faults.append(Fault("replace", path="blobs/", body=b"sm"))
    with pytest.raises(RegistryUnavailableError):
        download(backend, b"small")


def test_a_file_that_is_not_there_is_not_published(backend: OciBackend) -> None:
    with pytest.raises(NotPublishedError):
        download(backend, b"never uploaded")


def test_redirects_are_followed_without_credentials(
    backend: OciBackend, proxy: FaultProxy, server: OciServer, tmp_path: Path
) -> None:
    data = b"kept elsewhere"
    upload(backend, tmp_path, data)
    with fault_proxy(server.url) as elsewhere, oci_login(tmp_path, proxy.url):
        target = f"{elsewhere.url}/v2/{repository(backend)}/blobs/{digest_bytes(data)}"
        challenge = {"WWW-Authenticate": 'Basic realm="tests"'}
        proxy.faults += [
            Fault("status", path="blobs/", status=401, headers=challenge),
            Fault("status", path="blobs/", status=307, headers={"Location": target}),
        ]
        assert download(backend, data, 5) == data[5:]
        assert "Authorization" in proxy.headers[-1]
        assert "Authorization" not in elsewhere.headers[-1]
        assert elsewhere.headers[-1]["Range"] == "bytes=5-"


# What goes wrong


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AccessDeniedError),
        (403, AccessDeniedError),
        (404, NotPublishedError),
        (409, RegistryError),
        (400, RegistryError),
        (429, RegistryUnavailableError),
        (500, RegistryUnavailableError),
        (503, RegistryUnavailableError),
    ],
)
def test_refusals_are_told_apart(
    backend: OciBackend, proxy: FaultProxy, status: int, kind: type[RegistryError]
) -> None:
    name, _ = encode_record(some_record())
    body = b'{"errors":[{"code":"SOME_CODE","message":"with secrets in it"}]}'
    proxy.faults.append(Fault("status", path="manifests", status=status, times=9, body=body))
    with pytest.raises(kind, match="SOME_CODE") as caught:
        backend.read_record(MODEL, name)
    assert type(caught.value) is kind
    assert f"status {status}" in str(caught.value)
    assert "secrets" not in str(caught.value)
    assert ("docker login" in str(caught.value)) == (kind is AccessDeniedError)


def test_an_overloaded_registry_is_asked_again_when_it_says(backend: OciBackend, proxy: FaultProxy) -> None:
    name, data = encode_record(some_record())
    backend.write_record(MODEL, name, data)
    proxy.faults.append(Fault("status", path="manifests", status=429, headers={"Retry-After": "1"}))
    began = time.monotonic()
    assert backend.read_record(MODEL, name) == data
    assert time.monotonic() - began >= 1


def test_a_registry_that_reads_its_own_half_written_link_is_asked_again(
    backend: OciBackend, proxy: FaultProxy
) -> None:
    spoilt = b'{"errors": [{"code": "DIGEST_INVALID", "message": "provided digest did not match"}]}'
    proxy.faults.append(Fault("status", "PUT", "/manifests/", times=2, status=400, body=spoilt))
    name, data = encode_record(some_record())
    backend.write_record(MODEL, name, data)
    assert backend.read_record(MODEL, name) == data
    assert proxy.count("PUT", "/manifests/") == 3


def test_a_registry_that_is_down_is_unavailable() -> None:
    backend = OciBackend(f"oci+http://127.0.0.1:{free_port()}/models")
    with pytest.raises(RegistryUnavailableError, match="refused"):
        backend.list_records(MODEL)
    backend.close()


def test_a_registry_that_does_not_answer_is_unavailable(proxy: FaultProxy) -> None:
    backend = OciBackend(oci_url(proxy.url), read_timeout_s=0.3)
    proxy.faults.append(Fault("slow", delay_s=5, times=4))
    with pytest.raises(RegistryUnavailableError, match="in time"):
        backend.list_records(MODEL)
    backend.close()


def test_a_registry_without_tls_is_not_spoken_to_in_plain(proxy: FaultProxy) -> None:
    backend = OciBackend(oci_url(proxy.url).replace("oci+http", "oci"), read_timeout_s=2)
    with pytest.raises(RegistryError):
        backend.list_records(MODEL)
    assert proxy.requests == []
    backend.close()


def test_an_endless_manifest_is_given_up(backend: OciBackend, proxy: FaultProxy) -> None:
    name, data = encode_record(some_record())
    backend.write_record(MODEL, name, data)
    for path in ("manifests", "tags/list"):
        proxy.clear()
        proxy.faults.append(Fault("endless", method="GET", path=path, at_bytes=2**30))
        with pytest.raises(RegistryError, match="expected at most"):
            backend.read_record(MODEL, name) if path == "manifests" else backend.list_records(MODEL)
        assert proxy.sent_bytes < 100_000_000


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b'{"tags": 1}', b'{"tags": [1]}', b"\xff", b"[" * 100_000]
)
def test_an_answer_that_is_no_list_is_an_error(backend: OciBackend, proxy: FaultProxy, body: bytes) -> None:
    proxy.faults.append(Fault("replace", path="tags/list", status=200, body=body))
    with pytest.raises(RegistryError):
        backend.list_records(MODEL)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"\xff"])
def test_a_manifest_that_is_none_is_an_error(backend: OciBackend, proxy: FaultProxy, body: bytes) -> None:
    proxy.faults.append(Fault("replace", path="manifests", status=200, body=body))
    with pytest.raises(IntegrityError):
        backend.read_record(MODEL, encode_record(some_record())[0])


# What other tools see


def test_an_index_stands_under_every_label_and_alias(backend: OciBackend, tmp_path: Path) -> None:
    part, version, label, alias = published_records()
    publish(backend, tmp_path, version, label, alias, part=part)
    answers = [
        requests.get(api(backend, f"manifests/{tag}"), headers={"Accept": INDEX}, timeout=5)
        for tag in ("1.0", "prod")
    ]
    assert answers[0].content == answers[1].content
    index = answers[0].json()
    assert answers[0].headers["Content-Type"] == index["mediaType"] == INDEX
    targets = {one["annotations"]["dev.ortprep.target"]: one for one in index["manifests"]}
    assert set(targets) == {"cpu", "cuda"}
    wanted = {
        "cpu": {"manifest.json", "loader.json", "cpu-fp32/model.onnx", "cpu-int8/model.onnx"},
        "cuda": {"manifest.json", "loader.json", "gpu/model.onnx", "gpu/empty.bin"},
    }
    for target, listed in targets.items():
        answer = requests.get(
            api(backend, f"manifests/{listed['digest']}"), headers={"Accept": MANIFEST}, timeout=5
        )
        assert len(answer.content) == listed["size"]
        assert answer.json()["annotations"] == listed["annotations"]
        layers = answer.json()["layers"]
        assert {one["annotations"]["org.opencontainers.image.title"] for one in layers} == wanted[target]
        for layer in layers:
            blob = requests.get(api(backend, f"blobs/{layer['digest']}"), timeout=5).content
            assert blob == FILES[layer["annotations"]["org.opencontainers.image.title"]]
        config = requests.get(api(backend, f"blobs/{answer.json()['config']['digest']}"), timeout=5)
        assert config.content == encode_record(part)[1]


def test_showing_the_same_again_pushes_nothing(
    backend: OciBackend, proxy: FaultProxy, tmp_path: Path
) -> None:
    part, version, label, alias = published_records()
    state = publish(backend, tmp_path, version, label, alias, part=part)
    proxy.clear()
    backend.mirror(MODEL, state)
    backend.finish_part(MODEL, part)
    assert {method for method, _ in proxy.requests} == {"HEAD"}


def test_an_alias_moves_and_reserved_names_are_not_shown(backend: OciBackend, tmp_path: Path) -> None:
    part, version, label, alias = published_records()
    publish(backend, tmp_path, version, label, alias, part=part)
    newer = part_of(FILES, "2026-02-02T03:04:05Z")
    second = VersionRecord(MODEL, SOURCE, SPEC, (record_digest(newer),))
    moved = AliasRecord("prod", "promote", record_digest(second), 2, "2026-02-02T03:04:07Z")
    reserved = LabelRecord("ortprep-label", record_digest(second), "2026-02-02T03:04:08Z")
    publish(backend, tmp_path, part, version, label, alias, second, moved, reserved, part=newer)
    by_tag = {
        tag: requests.get(api(backend, f"manifests/{tag}"), headers={"Accept": INDEX}, timeout=5)
        for tag in ("1.0", "prod", "ortprep-label")
    }
    named = {tag: by_tag[tag].json()["annotations"]["dev.ortprep.version"] for tag in ("1.0", "prod")}
    assert named == {"1.0": record_digest(version), "prod": record_digest(second)}
    assert by_tag["ortprep-label"].status_code == 404


def test_targets_that_are_not_there_are_pushed_before_their_index(
    backend: OciBackend, tmp_path: Path
) -> None:
    part, version, label, _ = published_records()
    state = publish(backend, tmp_path, version, label, part=part)
    backend.delete_part(MODEL, record_digest(part))
    backend.mirror(MODEL, state)
    answer = requests.get(api(backend, "manifests/1.0"), headers={"Accept": INDEX}, timeout=5)
    assert answer.status_code == 200


def test_a_deleted_part_leaves_no_manifest_and_no_index(backend: OciBackend, tmp_path: Path) -> None:
    part, version, label, alias = published_records()
    publish(backend, tmp_path, version, label, alias, part=part)
    other = dataclasses.replace(part_of(FILES), created_at="2026-05-05T00:00:00Z")
    backend.finish_part(MODEL, other)
    backend.delete_part(MODEL, record_digest(part))
    backend.delete_part(MODEL, record_digest(part))
    tags = requests.get(api(backend, "tags/list"), timeout=5).json()["tags"]
    assert {tag for tag in tags if not tag.startswith("ortprep-")} == set()
    assert {tag for tag in tags if tag.startswith("ortprep-target-")} == {
        documents.target_tag(record_digest(other), target) for target in ("cpu", "cuda")
    }
    assert len(backend.list_records(MODEL)) == 4


def test_tags_of_targets_fit_whatever_their_names() -> None:
    for target in ("cpu", "x" * 128):
        assert len(documents.target_tag(SOURCE, target)) <= 128
    assert documents.target_tag(SOURCE, "x" * 127 + "a") != documents.target_tag(SOURCE, "x" * 128)


def test_a_registry_that_deletes_nothing_says_so(tmp_path: Path) -> None:
    with oci_server(tmp_path / "oci", delete=False) as server:
        backend = OciBackend(oci_url(server.url))
        name, data = encode_record(some_record())
        backend.write_record(MODEL, name, data)
        with pytest.raises(RegistryError, match="deletion is switched off"):
            backend.delete_record(MODEL, name)
        backend.close()


# Credentials


class oci_login:  # noqa: N801
    """Makes a Docker configuration hold credentials for a registry, as `docker login` does."""

    def __init__(self, folder: Path, url: str, password: str = PASSWORD) -> None:
        self._folder = folder / "docker"
        auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
        self._config = {"auths": {url.partition("://")[2]: {"auth": auth}}}
        self._before = os.environ.get("DOCKER_CONFIG")

    def __enter__(self) -> None:
        self._folder.mkdir(exist_ok=True)
        (self._folder / "config.json").write_text(json.dumps(self._config))
        os.environ["DOCKER_CONFIG"] = str(self._folder)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ["DOCKER_CONFIG"]
        else:
            os.environ["DOCKER_CONFIG"] = self._before


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    with (
        oci_server(tmp_path_factory.mktemp("locked"), auth=True) as running,
        fault_proxy(running.url) as proxy,
    ):
        yield proxy


def secrets_of(password: str) -> list[str]:
    return [password, base64.b64encode(f"{USER}:{password}".encode()).decode()]


def test_a_registry_that_wants_credentials_gets_those_of_docker_login(
    locked: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with oci_login(tmp_path, locked.url):
        backend = OciBackend(oci_url(locked.url), chunk_bytes=CHUNK_BYTES)
        part, version, label, alias = published_records()
        publish(backend, tmp_path, version, label, alias, part=part)
        upload(backend, tmp_path, BIG)
        assert download(backend, BIG) == BIG
        assert len(backend.list_records(MODEL)) == 4
        backend.close()
    assert "/v2/" in caplog.text
    assert not any(secret in caplog.text for secret in secrets_of(PASSWORD))
    assert "_state=" not in caplog.text


@pytest.mark.parametrize("password", ["", "wrong-but-secret"])
def test_wrong_credentials_are_named_nowhere(
    locked: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture, password: str
) -> None:
    caplog.set_level(logging.DEBUG)
    url = locked.url if password else "http://another.example"
    with oci_login(tmp_path, url, password):
        backend = OciBackend(oci_url(locked.url))
        with pytest.raises(AccessDeniedError, match="docker login 127") as caught:
            backend.list_records(MODEL)
        backend.close()
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert not any(secret in shown for secret in secrets_of(password) if password)


def test_the_first_request_in_vain_is_the_last(locked: FaultProxy, tmp_path: Path) -> None:
    with oci_login(tmp_path, locked.url):
        backend = OciBackend(oci_url(locked.url))
        backend.list_records(MODEL)
        locked.clear()
        backend.list_records(MODEL)
        backend.close()
    assert len(locked.requests) == 1


def test_a_token_is_asked_for_and_renewed_when_it_expires(
    backend: OciBackend, proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    realm = f'Bearer realm="{proxy.url}/token",service="tests",scope="repository:x:pull"'
    refusals = [
        Fault("status", path="tags/list", status=401, headers={"WWW-Authenticate": realm}) for _ in range(2)
    ]
    tokens = [
        Fault("status", path="^/token", status=200, body=json.dumps({"token": one}).encode())
        for one in ("token-one", "token-two")
    ]
    with oci_login(tmp_path, proxy.url):
        proxy.faults += [refusals[0], tokens[0]]
        backend.list_records(MODEL)
        proxy.faults += [refusals[1], tokens[1]]
        backend.list_records(MODEL)
    sent = [
        (path.partition("?")[0].rpartition("/")[2], headers.get("Authorization", ""))
        for (_, path), headers in zip(proxy.requests, proxy.headers, strict=True)
    ]
    basic = "Basic " + secrets_of(PASSWORD)[1]
    assert sent == [
        ("list", ""),
        ("token", basic),
        ("list", "Bearer token-one"),
        ("list", "Bearer token-one"),
        ("token", basic),
        ("list", "Bearer token-two"),
    ]
    assert not any(secret in caplog.text for secret in (*secrets_of(PASSWORD), "token-one", "token-two"))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("status", path="^/token", status=200, body=b"[]"), AccessDeniedError),
        (Fault("status", path="^/token", status=200, body=b"<html>"), AccessDeniedError),
        (Fault("status", path="^/token", status=401), AccessDeniedError),
        (Fault("status", path="^/token", status=503, times=9), RegistryUnavailableError),
        (Fault("status", path="^/token", status=200, body=bytes(2**21)), RegistryError),
    ],
)
def test_a_token_server_that_fails_is_an_error(
    backend: OciBackend, proxy: FaultProxy, tmp_path: Path, fault: Fault, kind: type[RegistryError]
) -> None:
    realm = f'Bearer realm="{proxy.url}/token",service="tests"'
    proxy.faults += [
        Fault("status", path="tags/list", status=401, headers={"WWW-Authenticate": realm}, times=9),
        dataclasses.replace(fault),
    ]
    with oci_login(tmp_path, proxy.url), pytest.raises(RegistryError) as caught:
        backend.list_records(MODEL)
    assert isinstance(caught.value, kind)


def test_uploads_elsewhere_get_no_credentials(locked: FaultProxy, server: OciServer, tmp_path: Path) -> None:
    with fault_proxy(server.url) as elsewhere, oci_login(tmp_path, locked.url):
        backend = OciBackend(oci_url(locked.url))
        begun = requests.post(f"{elsewhere.url}/v2/{repository(backend)}/blobs/uploads/", timeout=5).headers[
            "Location"
        ]
        locked.clear()
        locked.faults.append(Fault("slow", method="POST"))
        locked.faults.append(Fault("status", method="POST", status=202, headers={"Location": begun}))
        upload(backend, tmp_path, b"somewhere else")
        backend.close()
        assert "PUT" in {method for method, _ in elsewhere.requests}
        assert all("Authorization" not in headers for headers in elsewhere.headers)
    locked.clear()
