"""The store that driver and nodes share: files, and outcomes of finished jobs.

STORE/NAME/outcomes/KIND/HEX.json      what a finished job made of a source
STORE/NAME/files/HE/HEX                files of sources and specs by digest
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ortprep.build.receipts import RECEIPT_VERSION, TaskReceipt
from ortprep.bundle.atomic import new_folder
from ortprep.bundle.codec import canonical_json, decode, encode
from ortprep.bundle.digest import PREFIX
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.paths import is_safe_name, resolve_inside
from ortprep.errors import BundleError, IntegrityError, NotPublishedError, RegistryError
from ortprep.spec.urls import has_credentials, redact_url
from ortprep.transport.fsspec_folder import FsspecFolder
from ortprep.transport.transfer import download, ignore, map_parallel

MAX_RECORD_BYTES = 32 * 2**20
"""Largest record that is read; those of long searches take a few hundred KB."""


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of a finished job.

    Attributes:
        schema_version: Version of the receipts.
        registry: URL of the registry that the part is in.
        part: Digest of the part that it published.
        receipts: Receipts of all tasks but the fetching: their keys say on what machine it holds.
    """

    schema_version: str
    registry: str
    part: str
    receipts: tuple[TaskReceipt, ...]


class WorkStore:
    """Files of a model and outcomes of its jobs. Every method raises a `RegistryError` if the store fails.

    Args:
        url: An absolute path that all nodes see, or the URL of an object store.
        model: Name of the model.

    Raises:
        RegistryError: The URL carries credentials, or `check_url` refuses it.
        MissingExtraError: The filesystem's package is not installed.
    """

    def __init__(self, url: str, model: str) -> None:
        if has_credentials(url):
            raise RegistryError(
                f"credentials in a store's URL: {redact_url(url)}\n"
                "  expected none: they would end up in logs and process lists",
                hint="each filesystem takes them from its usual environment variables and files",
            )
        self._folder = FsspecFolder(url, called="work store")
        self._model = model

    def read_outcome(self, kind: str, source: str) -> JobOutcome | None:
        """Returns what a job made of a source by its digest; None if there is nothing that can be read."""
        path = self._outcome_path(kind, source)
        try:
            fields = json.loads(self._folder.read(path, limit_bytes=MAX_RECORD_BYTES)[:MAX_RECORD_BYTES])
            return decode(JobOutcome, fields) if fields["schema_version"] == RECEIPT_VERSION else None
        except NotPublishedError:
            return None
        except (BundleError, ValueError, TypeError, KeyError, RecursionError):
            return None  # then the work is done again

    def write_outcome(self, kind: str, source: str, outcome: JobOutcome) -> None:
        """Writes what a job made of a source; its part has to be in the registry before."""
        self._folder.write(self._outcome_path(kind, source), canonical_json(encode(outcome)))

    def check_writable(self) -> None:
        """Writes something and removes it."""
        path = self._path("files", f"probe-{os.urandom(8).hex()}")
        self._folder.write(path, b"")
        self._folder.delete(path)

    def upload(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Uploads those files of a folder that the store does not have yet.

        Raises:
            IntegrityError: A file is not as its entry says.
            RegistryError: The store failed.
        """

        def send(entry: FileEntry) -> None:
            path = self._file_path(entry)
            file = self._folder.describe_file(path)
            if file is None or file.size_bytes != entry.size_bytes:
                self._folder.upload(path, entry, folder / entry.path, ignore)

        map_parallel(send, list({entry.sha256: entry for entry in entries}.values()))

    def fetch_files(self, folder: Path, entries: Sequence[FileEntry]) -> None:
        """Makes a folder of exactly these files, whole or not at all.

        Raises:
            NotPublishedError: The store does not have a file.
            IntegrityError: A file has other bytes than its entry says.
        """
        with new_folder(folder, durable=False) as written:
            map_parallel(lambda entry: self._fetch(entry, written), entries)

    def _fetch(self, entry: FileEntry, folder: Path) -> None:
        """Fetches a file to its place below a folder."""
        path = resolve_inside(folder, entry.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        place = self._file_path(entry)
        try:
            download(
                lambda offset, _: self._folder.open(place, offset, name=entry.path),
                path,
                name=entry.path,
                expected=entry,
            )
        except IntegrityError:
            # A file of the right size would count as uploaded.
            self._folder.delete(place)
            raise

    def _outcome_path(self, kind: str, source: str) -> str:
        return self._path("outcomes", kind, f"{source.removeprefix(PREFIX)}.json")

    def _file_path(self, entry: FileEntry) -> str:
        text = entry.sha256.removeprefix(PREFIX)
        return self._path("files", text[:2], text)

    def _path(self, *parts: str) -> str:
        unsafe = [part for part in (self._model, *parts) if not is_safe_name(part)]
        if unsafe:
            raise RegistryError(f"bad name in a store: {unsafe[0][:80]!r}")
        return "/".join((self._model, *parts))
