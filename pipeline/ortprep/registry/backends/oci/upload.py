"""Uploads of blobs to an OCI registry: in chunks, going on where the last one broke off."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import requests

from ortprep.bundle.digest import digest_file
from ortprep.bundle.file_memory import open_regular
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import RegistryUnavailableError
from ortprep.registry.backend import Report
from ortprep.registry.backends.oci.repository import Repository
from ortprep.registry.retries import with_retries
from ortprep.registry.transfer import check_copied

CHUNK_BYTES = 16 * 1024 * 1024
"""What is sent in one request, unless a user wants it otherwise; smaller files go as a whole."""

_MAX_RESTARTS = 3
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})")
_LOST = (400, 404, 409, 416)
"""What registries answer when they know the upload no longer, or have another idea of how far it is."""


class Upload:
    """An upload of one file; the last chunk goes with the request that completes it.

    The registry compares the bytes with the digest before it keeps them.

    Raises:
        IntegrityError: The file has other bytes than `entry` says.
    """

    def __init__(
        self, repository: Repository, entry: FileEntry, source: Path, report: Report, chunk_bytes: int
    ) -> None:
        self._repository = repository
        self._entry = entry
        self._source = source
        self._report = report
        self._chunk_bytes = chunk_bytes
        self._location = ""
        self._offset = 0
        self._restarts = 0
        self._is_unsure = False
        if source.stat().st_size != entry.size_bytes:
            self._check_source()

    def run(self) -> None:
        """Sends chunk after chunk; each may fail a few times, however many there are."""
        while not with_retries(self._step):
            pass

    def _step(self) -> bool:
        """Brings the upload on by a chunk, or fails and can be called again; says whether it is complete."""
        if self._is_unsure:
            if self._repository.has_blob(self._entry.sha256):
                self._go_to(self._entry.size_bytes)
                return True
            self._ask_offset()
        if not self._location:
            begun = self._ask("POST", "blobs/uploads/", b"", expected=(202,))
            self._location = self._repository.resolve(begun.headers.get("Location"))
        with open_regular(self._source) as file:
            file.seek(self._offset)
            chunk = file.read(min(self._chunk_bytes, self._entry.size_bytes - self._offset))
        is_last = self._offset + len(chunk) == self._entry.size_bytes
        self._is_unsure = True
        if is_last:
            self._complete(chunk)
        else:
            self._send(chunk)
        self._is_unsure = False
        return is_last and self._offset == self._entry.size_bytes

    def _send(self, chunk: bytes) -> None:
        before, end = self._offset, self._offset + len(chunk)
        answer = self._ask("PATCH", self._location, chunk, expected=(202, 204, *_LOST), offset=before)
        if answer.status_code not in _LOST:
            self._take_position(answer, end)
        if self._offset <= before:
            raise RegistryUnavailableError(
                f"upload does not advance: {self._entry.path} to {self._repository.place}\n"
                f"  expected {end} bytes, got {self._offset} with status {answer.status_code}"
            )

    def _complete(self, chunk: bytes) -> None:
        mark = "&" if "?" in self._location else "?"
        url = f"{self._location}{mark}digest={quote(self._entry.sha256, safe='')}"
        answer = self._ask("PUT", url, chunk, expected=(201, 204, *_LOST))
        if answer.status_code in _LOST:
            self._restart()
        else:
            self._go_to(self._entry.size_bytes)

    def _ask_offset(self) -> None:
        answer = self._ask("GET", self._location, expected=(204, *_LOST)) if self._location else None
        if answer is None or answer.status_code in _LOST:
            self._restart()
        else:
            self._take_position(answer, self._offset)

    def _ask(
        self, method: str, url: str, body: bytes | None = None, *, expected: tuple[int, ...], offset: int = -1
    ) -> requests.Response:
        headers = {"Content-Type": "application/octet-stream"}
        if body and offset >= 0:
            headers["Content-Range"] = f"{offset}-{offset + len(body) - 1}"
        doing = f"upload {self._entry.path}"
        return self._repository.ask(method, url, doing, headers=headers, body=body, expected=expected)[0]

    def _take_position(self, answer: requests.Response, expected_end: int) -> None:
        """Goes on where the registry says that the upload is, and from the byte that it has come to."""
        location = answer.headers.get("Location")
        if location:
            self._location = self._repository.resolve(location)
        received = _RANGE.fullmatch(answer.headers.get("Range", ""))
        end = int(received[1]) + 1 if received else expected_end
        if end > self._entry.size_bytes:
            self._restart()
        else:
            # `0-0` should mean one byte, but it is what registries say when they have none.
            self._go_to(end if end > 1 else 0)

    def _restart(self) -> None:
        self._check_source()
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            raise RegistryUnavailableError(
                f"upload lost too often: {self._entry.path} to {self._repository.place}\n"
                f"  expected at most {_MAX_RESTARTS} times"
            )
        self._location = ""
        self._go_to(0)

    def _check_source(self) -> None:
        check_copied(self._entry, self._source.stat().st_size, digest_file(self._source))

    def _go_to(self, offset: int) -> None:
        if offset != self._offset:
            self._report(offset - self._offset)
        self._offset = offset
