"""A folder as a registry: on a disk, or on any store that fsspec has a filesystem for.

ROOT/NAME/records/KIND-HEX.json     records
ROOT/NAME/files/HE/HEX              files by digest: versions that share weights store them once
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from pipeline.bundle.atomic import TEMP_PREFIX
from pipeline.bundle.digest import PREFIX
from pipeline.bundle.loader_config import FileEntry
from pipeline.bundle.paths import is_safe_name
from pipeline.errors import NotPublishedError, RegistryError
from pipeline.registry.backend import Block, Report, StoredFile
from pipeline.registry.fsspec_folder import FsspecFolder
from pipeline.registry.records import MAX_RECORD_BYTES, MAX_RECORDS, PartRecord, RecordName
from pipeline.registry.state import State, Version

_RECORDS, _FILES = "records", "files"
_LEFTOVER_S = 24 * 3600.0


class DirectoryBackend:
    """A registry in a folder.

    Args:
        url: A path, or an fsspec URL.

    Raises:
        RegistryError: No filesystem knows the URL's scheme.
        MissingExtraError: The filesystem's package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._folder = FsspecFolder(url)

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models, sorted, and of what publishers that were killed left.

        Raises:
            NotPublishedError: There is no such folder.
        """
        if self._folder.is_absent():
            raise NotPublishedError(f"no registry there: {self._folder.name}\n  expected a folder, got none")
        names = sorted(name for name in self._folder.list_names("") if is_safe_name(name))
        return tuple(name for name in names if {_RECORDS, _FILES} & set(self._folder.list_names(name)))

    def list_records(self, model: str) -> tuple[RecordName, ...]:
        """Returns the names of a model's records."""
        names = self._folder.list_names(_path(model, _RECORDS))
        parsed = (RecordName.parse(name.removesuffix(".json")) for name in names)
        found = tuple(sorted(name for name in parsed if name is not None))
        if len(found) > MAX_RECORDS:
            raise RegistryError(
                f"too many records of {model} in {self._folder.name}\n  expected at most {MAX_RECORDS}"
            )
        return found

    def read_record(self, model: str, name: RecordName) -> bytes:
        """Returns a record's bytes, unchecked."""
        return self._folder.read(_record_path(model, name), limit_bytes=MAX_RECORD_BYTES)

    def write_record(self, model: str, name: RecordName, data: bytes) -> None:
        """Writes a record; it is listed once it is there whole."""
        self._folder.write(_record_path(model, name), data)

    def delete_record(self, model: str, name: RecordName) -> None:
        """Removes a record."""
        self._folder.delete(_record_path(model, name))

    def find_missing(self, model: str, part: PartRecord) -> tuple[FileEntry, ...]:
        """Returns those of a part's files that have to be uploaded, each digest once."""
        present = {file.digest: file.size_bytes for file in self.list_files(model)}
        missing = {
            entry.sha256: entry for entry in part.files if present.get(entry.sha256) != entry.size_bytes
        }
        return tuple(missing.values())

    def upload_file(
        self,
        model: str,
        part: PartRecord,  # noqa: ARG002 - files of all parts lie together
        entry: FileEntry,
        source: Path,
        report: Report,
    ) -> None:
        """Uploads a file; what is kept is exactly the bytes that `entry` describes."""
        self._folder.upload(_file_path(model, entry.sha256), entry, source, report)

    def finish_part(self, model: str, part: PartRecord) -> None:
        """Does nothing: a part is its files."""

    def open_file(
        self,
        model: str,
        part: PartRecord,  # noqa: ARG002 - files of all parts lie together
        entry: FileEntry,
        offset: int,
    ) -> AbstractContextManager[Iterator[Block]]:
        """Yields the blocks of a file from `offset` on, unchecked."""
        return self._folder.open(_file_path(model, entry.sha256), offset, f"{entry.path} of {model}")

    def list_files(self, model: str) -> tuple[StoredFile, ...]:
        """Returns all files of a model."""
        sizes = self._folder.find_sizes(_path(model, _FILES))
        return tuple(
            StoredFile(PREFIX + name, size_bytes)
            for name, size_bytes in sorted(sizes.items())
            if len(name) == 64
        )

    def delete_files(self, model: str, digests: Sequence[str]) -> None:
        """Removes files; of none, what uploads left that broke off more than a day ago."""
        for digest in digests:
            self._folder.delete(_file_path(model, digest))
        if not digests:
            for leftover in self._folder.leftovers(f"{_path(model, _FILES)}/*/{TEMP_PREFIX}*"):
                with suppress(OSError):
                    if time.time() - leftover.stat().st_mtime > _LEFTOVER_S:
                        leftover.unlink()

    def delete_part(self, model: str, digest: str) -> None:
        """Does nothing: a part is its files."""

    def delete_version(self, model: str, version: Version) -> None:
        """Does nothing: a folder has no other users."""

    def mirror(self, model: str, state: State) -> None:
        """Does nothing: a folder has no other users."""

    def close(self) -> None:
        """Does nothing."""


def _path(model: str, *parts: str) -> str:
    if not is_safe_name(model):
        raise RegistryError(f"no name of a model: {model[:80]!r}")
    return "/".join((model, *parts))


def _record_path(model: str, name: RecordName) -> str:
    return _path(model, _RECORDS, f"{name}.json")


def _file_path(model: str, digest: str) -> str:
    text = digest.removeprefix(PREFIX)
    return _path(model, _FILES, text[:2], text)
