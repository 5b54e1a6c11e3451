"""Laws of the work store, on a disk and on S3: what is read is what was written, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortprep.build.receipts import RECEIPT_VERSION, TaskReceipt
from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.verification import describe_files
from ortprep.cluster.building.work_store import JobOutcome, WorkStore
from ortprep.errors import IntegrityError, NotPublishedError, RegistryError
from ortprep.transport.fsspec_folder import FsspecFolder
from tests.registry.servers import BUCKET, s3_server

SOURCE = f"sha256:{0:064x}"


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture(params=["disk", "s3"])
def store(request, tmp_path, monkeypatch):
    if request.param == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3"))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        return WorkStore(f"s3://{BUCKET}/{tmp_path.name}", "net")
    return WorkStore(str(tmp_path / "store"), "net")


def receipt(folder: Path | None = None) -> TaskReceipt:
    files = () if folder is None else describe_files(folder, digest_file)
    return TaskReceipt(
        RECEIPT_VERSION, "optimize/cpu", {"a": 1}, files, {"b": [1, 2]}, "2026-01-01T00:00:00+00:00", 1.5
    )


def fill(folder: Path) -> Path:
    (folder / "below").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "below" / "weights").write_bytes(bytes(range(256)) * 4096)
    (folder / "twin").write_bytes(b"graph")
    return folder


def test_files_come_back_as_they_were_and_are_sent_once(store, tmp_path, monkeypatch):
    folder = fill(tmp_path / "left")
    entries = receipt(folder).files
    sent: list[str] = []
    upload = FsspecFolder.upload

    def note(own: FsspecFolder, path: str, entry: FileEntry, *rest: Any) -> None:
        sent.append(entry.path)
        upload(own, path, entry, *rest)

    monkeypatch.setattr(FsspecFolder, "upload", note)
    store.upload(folder, entries)
    assert len(sent) == 2  # twins are one file
    store.upload(folder, entries)
    assert len(sent) == 2
    store.fetch_files(tmp_path / "right", entries)
    assert describe_files(tmp_path / "right", digest_file) == entries


def test_a_record_is_read_as_it_was_written(store, tmp_path):
    assert store.read_outcome("cpu", SOURCE) is None
    written = receipt(fill(tmp_path / "left"))
    outcome = JobOutcome(RECEIPT_VERSION, "file:///registry", "sha256:1", (written,))
    store.write_outcome("cpu", SOURCE, outcome)
    assert store.read_outcome("cpu", SOURCE) == outcome
    assert store.read_outcome("h100", SOURCE) is None
    assert store.read_outcome("cpu", f"sha256:{1:064x}") is None


def test_what_is_lost_is_said_and_leaves_nothing_half_done(store, tmp_path):
    entries = receipt(fill(tmp_path / "left")).files
    with pytest.raises(NotPublishedError):
        store.fetch_files(tmp_path / "right", entries)
    assert not (tmp_path / "right").exists()


def test_a_file_that_is_not_as_described_is_not_kept(store, tmp_path):
    folder = fill(tmp_path / "left")
    entries = receipt(folder).files
    (folder / "model.onnx").write_bytes(b"GRAPH")
    with pytest.raises(IntegrityError):
        store.upload(folder, [entry for entry in entries if entry.path == "model.onnx"])


@pytest.mark.attack
def test_other_bytes_in_the_store_are_found(tmp_path):
    store = WorkStore(str(tmp_path / "store"), "net")
    folder = fill(tmp_path / "left")
    entries = receipt(folder).files
    store.upload(folder, entries)
    for path in (tmp_path / "store" / "net" / "files").rglob("*"):
        if path.is_file() and path.stat().st_size == 5:
            path.write_bytes(b"GRAPH")
    entry = next(entry for entry in entries if entry.path == "model.onnx")
    with pytest.raises(IntegrityError):
        store.fetch_files(tmp_path / "right", [entry])
    # And whoever has the right ones can send them again.
    store.upload(folder, [entry])
    store.fetch_files(tmp_path / "right", [entry])


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": "9.0"}', "[]", '"x"'])
def test_an_outcome_that_cannot_be_read_means_that_the_work_is_done_again(tmp_path, text):
    path = tmp_path / "store" / "net" / "outcomes" / "cpu" / f"{0:064x}.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert WorkStore(str(tmp_path / "store"), "net").read_outcome("cpu", SOURCE) is None


@pytest.mark.attack
@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_no_name_leaves_the_store(tmp_path, name):
    store = WorkStore(str(tmp_path / "store"), name)
    with pytest.raises(RegistryError, match="bad name in a store"):
        store.read_outcome("cpu", SOURCE)
    with pytest.raises(RegistryError, match="bad name in a store"):
        WorkStore(str(tmp_path / "store"), "net").read_outcome(name, SOURCE)


@pytest.mark.attack
def test_credentials_do_not_belong_into_its_url():
    with pytest.raises(RegistryError, match="credentials in a store's URL") as caught:
        WorkStore("ftp://me:secret@host/store", "net")
    assert "secret" not in str(caught.value)
