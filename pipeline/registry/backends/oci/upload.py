"""Uploads of blobs to an OCI registry: in chunks, going on where the last one broke off."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from pipeline.bundle.digest import PREFIX, digest_bytes
from pipeline.bundle.loader_config import FileEntry
from pipeline.bundle.regular_file import open_regular
from pipeline.errors import RegistryUnavailableError
from pipeline.registry.backend import Report
from pipeline.registry.backends.oci.requests import Answer, Request
from pipeline.registry.retries import with_retries
from pipeline.registry.transfer import check_copied

if TYPE_CHECKING:
    from pipeline.registry.backends.oci.client import OciClient

CHUNK_BYTES = 16 * 1024 * 1024
"""What is sent in one request, unless a user wants it otherwise; smaller files go as a whole."""

_MAX_RESTARTS = 3
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})")
_LOST = (400, 404, 409, 416)
"""What registries answer when they know the upload no longer, or have another idea of how far it is."""


def has_blob(client: OciClient, repository: str, digest: str) -> bool:
    """Says whether a repository has a blob.

    Raises:
        RegistryError: It cannot be asked.
    """
    request = Request("HEAD", f"blobs/{digest}", "look for a file", repository, expected=(200, 404))
    return client.fetch(request).status == 200


def put_blob(client: OciClient, repository: str, data: bytes) -> None:
    """Uploads a small blob, unless it is there.

    Raises:
        RegistryError: It cannot be uploaded.
    """
    if not has_blob(client, repository, digest_bytes(data)):
        with_retries(lambda: _put_whole(client, repository, data))


def put_file(
    client: OciClient,
    repository: str,
    entry: FileEntry,
    source: Path,
    report: Report,
    *,
    chunk_bytes: int,
) -> None:
    """Uploads a file.

    Args:
        client: The registry.
        repository: The repository.
        entry: What the file has to be.
        source: The file.
        report: Told of what went over.
        chunk_bytes: What is sent in one request.

    Raises:
        IntegrityError: The file has other bytes.
        RegistryError: It cannot be uploaded.
        OSError: It cannot be read.
    """
    if entry.size_bytes > chunk_bytes:
        _Upload(client, repository, entry, source, report, chunk_bytes).run()
        return
    with open_regular(source) as file:
        data = file.read(chunk_bytes + 1)
    check_copied(entry, len(data), digest_bytes(data))
    with_retries(lambda: _put_whole(client, repository, data))
    report(len(data))


def _put_whole(client: OciClient, repository: str, data: bytes) -> None:
    location = _begin(client, repository)
    if not _commit(client, repository, location, digest_bytes(data), data):
        raise RegistryUnavailableError(
            f"upload lost: {client.host}/{repository}\n  expected it to be completed, got it refused"
        )


def _begin(client: OciClient, repository: str) -> str:
    request = Request("POST", "blobs/uploads/", "begin an upload", repository, body=b"", expected=(202,))
    return client.resolve(client.fetch_once(request).headers.get("Location"), request)


def _commit(client: OciClient, repository: str, location: str, digest: str, data: bytes) -> bool:
    """Ends an upload; says whether the registry has it now, whole and unchanged."""
    url = f"{location}{'&' if '?' in location else '?'}digest={quote(digest, safe='')}"
    request = Request(
        "PUT",
        url,
        "complete an upload",
        repository,
        headers={"Content-Type": "application/octet-stream"},
        body=data,
        expected=(201, 204, *_LOST),
    )
    return client.fetch_once(request).status not in _LOST


class _Upload:
    """One file on its way."""

    def __init__(
        self,
        client: OciClient,
        repository: str,
        entry: FileEntry,
        source: Path,
        report: Report,
        chunk_bytes: int,
    ) -> None:
        self._client = client
        self._repository = repository
        self._entry = entry
        self._source = source
        self._report = report
        self._chunk_bytes = chunk_bytes
        self._hash = hashlib.sha256()
        self._hashed_bytes = 0
        self._location = ""
        self._offset = 0
        self._restarts = 0
        self._is_unsure = False

    def run(self) -> None:
        """Sends chunk after chunk; each may fail a few times, however many there are."""
        while not with_retries(self._step):
            pass

    def _step(self) -> bool:
        """Brings the upload on by a chunk; says whether it is complete."""
        if self._is_unsure:
            if self._offset == self._entry.size_bytes and has_blob(
                self._client, self._repository, self._entry.sha256
            ):
                return True
            self._ask_offset()
        if not self._location:
            self._location = _begin(self._client, self._repository)
        self._is_unsure = True
        if self._offset == self._entry.size_bytes:
            complete = self._complete()
        else:
            self._send_chunk()
            complete = False
        self._is_unsure = False
        return complete

    def _ask_offset(self) -> None:
        if self._location:
            request = Request(
                "GET", self._location, "ask for an upload", self._repository, expected=(204, *_LOST)
            )
            answer = self._client.fetch_once(request)
            if answer.status == 204:
                self._moved(answer, expected_end=self._offset)
                self._is_unsure = False
                return
        self._restart()

    def _restart(self) -> None:
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            raise RegistryUnavailableError(
                f"upload lost again and again: {self._entry.path} to {self._client.host}/{self._repository}\n"
                f"  expected at most {_MAX_RESTARTS} times"
            )
        self._location = ""
        self._go_to(0)
        self._is_unsure = False

    def _go_to(self, offset: int) -> None:
        if offset != self._offset:
            self._report(offset - self._offset)
        self._offset = offset

    def _moved(self, answer: Answer, *, expected_end: int) -> None:
        """Takes over where the registry says that the upload is and how far it has come."""
        found = _RANGE.fullmatch(answer.headers.get("Range", ""))
        end = int(found[1]) + 1 if found else expected_end
        location = answer.headers.get("Location")
        if location:
            request = Request("GET", "", "ask for an upload", self._repository)
            self._location = self._client.resolve(location, request)
        if end > self._entry.size_bytes:
            self._restart()
        else:
            # `0-0` should mean one byte, but it is what registries say when they have none.
            self._go_to(end if end > 1 else 0)

    def _send_chunk(self) -> None:
        chunk = self._read_chunk()
        end = self._offset + len(chunk)
        request = Request(
            "PATCH",
            self._location,
            "upload a file",
            self._repository,
            headers={
                "Content-Type": "application/octet-stream",
                "Content-Range": f"{self._offset}-{end - 1}",
            },
            body=chunk,
            expected=(202, 204, *_LOST),
        )
        answer = self._client.fetch_once(request)
        if answer.status in _LOST:
            raise RegistryUnavailableError(
                f"upload lost: {self._entry.path} to {self._client.host}/{self._repository}\n"
                f"  expected status 202, got {answer.status}"
            )
        before = self._offset
        self._moved(answer, expected_end=end)
        if self._offset <= before:
            raise RegistryUnavailableError(
                f"upload does not advance: {self._entry.path} to {self._client.host}/{self._repository}\n"
                f"  expected {end} bytes, got {self._offset}"
            )

    def _read_chunk(self) -> bytes:
        wanted = min(self._chunk_bytes, self._entry.size_bytes - self._offset)
        with open_regular(self._source) as file:
            file.seek(self._offset)
            chunk = file.read(wanted)
        end = self._offset + len(chunk)
        if len(chunk) < wanted:
            check_copied(self._entry, end, "fewer bytes")
        if end > self._hashed_bytes:
            self._hash.update(memoryview(chunk)[self._hashed_bytes - self._offset :])
            self._hashed_bytes = end
        return chunk

    def _complete(self) -> bool:
        check_copied(self._entry, self._source.stat().st_size, PREFIX + self._hash.hexdigest())
        if _commit(self._client, self._repository, self._location, self._entry.sha256, b""):
            return True
        self._restart()
        return False
