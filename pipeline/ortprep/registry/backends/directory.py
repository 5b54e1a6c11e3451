"""A folder as a registry: on a disk or an object store.

ROOT/NAME/versions/LABEL.json               versions: the name is the label, so no two have the same
ROOT/NAME/aliases/ALIAS                     the digest of the version that an alias names
ROOT/NAME/parts/HEX.json                    parts
ROOT/NAME/blobs/HE/HEX                      files by digest: versions that share weights store them once
ROOT/NAME/attached/HEX/KIND-HEX.json        signatures, moves of aliases
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from ortprep.bundle.atomic import TEMP_PREFIX
from ortprep.bundle.digest import PREFIX, digest_bytes, is_digest
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import NotPublishedError, RegistryError
from ortprep.registry.backend import KIND_NAMES, MAX_VERSIONS, Backend, Download, Known, Report, SweepResult
from ortprep.registry.documents import MAX_DOCUMENT_BYTES, Part, Version, check_model_name
from ortprep.registry.fsspec_folder import FsspecFolder, StoredFile
from ortprep.registry.transfer import read_documents

_LEFTOVER_S = 24 * 3600.0
_FRESH_S = 3600.0
"""Age up to which a file need not be refreshed."""

_SWEPT_NAME = re.compile(rf"({re.escape(TEMP_PREFIX)})?[0-9a-f]{{64}}(\.json)?(~[0-9a-f]{{16}})?")
"""Names of the files that a collection may remove: those of parts and blobs, and of unfinished ones."""


class DirectoryBackend(Backend):
    """A registry in a folder, by its path or fsspec URL; raises as `FsspecFolder`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._folder = FsspecFolder(url)

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models, sorted, and of what publishers that were killed left."""
        if self._folder.is_absent():
            raise NotPublishedError(f"no registry found: {self._folder.name}\n  expected a folder, got none")
        names = sorted(name for name in self._folder.list_names("") if is_safe_name(name))
        return tuple(name for name in names if {"versions", "blobs"} & set(self._folder.list_names(name)))

    def read_versions(self, model: str, known: Known) -> tuple[bytes, ...]:
        return tuple(self._read_all(self._list_files(_path(model, "versions"))).values())

    def _list_files(self, folder: str, start: str = "") -> list[str]:
        """Returns the paths of the files in a folder whose names have a start."""
        listed = self._folder.list_names(folder)
        names = [name for name in listed if name.startswith(start) and not name.startswith(TEMP_PREFIX)]
        if len(names) > MAX_VERSIONS:
            raise RegistryError(
                f"too many files: {folder} in {self._folder.name}\n  expected at most {MAX_VERSIONS}"
            )
        return [f"{folder}/{name}" for name in names]

    def _read_all(self, paths: Sequence[str]) -> dict[str, bytes]:
        def read(path: str) -> bytes | None:
            with suppress(NotPublishedError):  # removed since it was listed
                return self._folder.read(path, limit_bytes=MAX_DOCUMENT_BYTES)
            return None

        return read_documents(read, paths)

    def read_aliases(self, model: str) -> Mapping[str, str]:
        documents = self._read_all(self._list_files(_path(model, "aliases")))
        texts = {
            path.rpartition("/")[2]: data.decode("ascii", errors="replace").strip()
            for path, data in documents.items()
        }
        return {name: text for name, text in texts.items() if is_safe_name(name) and is_digest(text)}

    def add_version(self, model: str, version: Version) -> bool:
        path = _version_path(model, version)
        if self._folder.create(path, version.data):
            return True
        return self._folder.read(path, limit_bytes=MAX_DOCUMENT_BYTES) == version.data

    def delete_version(self, model: str, version: Version) -> None:
        with suppress(NotPublishedError):
            path = _version_path(model, version)
            if self._folder.read(path, limit_bytes=MAX_DOCUMENT_BYTES) == version.data:
                self._folder.delete(path)
        for path in self._folder.find(_attached_path(model, version.digest)):
            self._folder.delete(path)

    def set_alias(self, model: str, alias: str, version: Version) -> None:
        self._folder.write(_path(model, "aliases", alias), version.digest.encode())

    def find_missing(self, model: str, part: Part) -> tuple[FileEntry, ...]:
        present = self._folder.find(_path(model, "blobs"))
        missing = {}
        for entry in part.files:
            path = _blob_path(model, entry.sha256)
            file = present.get(path)
            if file is None or file.size_bytes != entry.size_bytes or not self._refresh(path, file):
                missing[entry.sha256] = entry
        return tuple(missing.values())

    def _refresh(self, path: str, file: StoredFile) -> bool:
        """Says whether a file is there, and young."""
        with suppress(NotPublishedError):  # swept since it was listed
            return time.time() - file.modified_s < _FRESH_S or self._folder.refresh(path)
        return False

    def upload_file(self, model: str, part: Part, entry: FileEntry, source: Path, report: Report) -> None:
        self._folder.upload(_blob_path(model, entry.sha256), entry, source, report)

    def put_part(self, model: str, part: Part) -> None:
        self._folder.write(_part_path(model, part.digest), part.data)

    def read_part(self, model: str, digest: str) -> bytes:
        return self._folder.read(_part_path(model, digest), limit_bytes=MAX_DOCUMENT_BYTES)

    def open_file(
        self, model: str, part: Part, entry: FileEntry, offset: int
    ) -> AbstractContextManager[Download]:
        return self._folder.open(_blob_path(model, entry.sha256), offset, name=entry.path)

    def attach(self, model: str, subject: Part | Version, kind: str, data: bytes) -> None:
        name = f"{KIND_NAMES[kind]}-{digest_bytes(data).removeprefix(PREFIX)}.json"
        self._folder.write(f"{_attached_path(model, subject.digest)}/{name}", data)

    def read_attached(
        self, model: str, subjects: Sequence[Part | Version], kind: str
    ) -> Mapping[str, tuple[bytes, ...]]:
        paths = {
            subject.digest: self._list_files(_attached_path(model, subject.digest), f"{KIND_NAMES[kind]}-")
            for subject in subjects
        }
        documents = self._read_all([path for listed in paths.values() for path in listed])
        return {
            digest: tuple(documents[path] for path in listed if path in documents)
            for digest, listed in paths.items()
        }

    def sweep(self, model: str, live: Collection[Part], *, grace_s: float, dry_run: bool) -> SweepResult:
        blobs = {_blob_path(model, entry.sha256) for part in live for entry in part.files}
        documents = {_part_path(model, part.digest) for part in live}
        parts = self._sweep(_path(model, "parts"), documents, grace_s, dry_run=dry_run)
        files = self._sweep(_path(model, "blobs"), blobs, grace_s, dry_run=dry_run)
        digests = tuple(PREFIX + path.rpartition("/")[2].removesuffix(".json") for path in parts)
        return SweepResult(digests, len(files), sum(files.values()))

    def _sweep(self, folder: str, live: set[str], grace_s: float, *, dry_run: bool) -> dict[str, int]:
        """Removes old files but the live ones, and what killed publishers left; returns their sizes."""
        gone = {}
        for path, file in sorted(self._folder.find(folder).items()):
            name = path.rpartition("/")[2]
            if not _SWEPT_NAME.fullmatch(name):
                continue  # not ours
            is_leftover = name.startswith(TEMP_PREFIX)
            oldest_s = time.time() - (_LEFTOVER_S if is_leftover else grace_s)
            if path in live or file.modified_s > oldest_s:
                continue
            # Looked at again: a publisher may have refreshed it since it was listed.
            again = file if dry_run else self._folder.find(path).get(path)
            if again is None or again.modified_s > oldest_s:
                continue
            if not is_leftover:
                gone[path] = file.size_bytes
            if not dry_run:
                self._folder.delete(path)
        return gone


def _path(model: str, *parts: str) -> str:
    return "/".join((check_model_name(model), *parts))


def _version_path(model: str, version: Version) -> str:
    return _path(model, "versions", f"{version.label}.json")


def _part_path(model: str, digest: str) -> str:
    return _path(model, "parts", f"{digest.removeprefix(PREFIX)}.json")


def _blob_path(model: str, digest: str) -> str:
    text = digest.removeprefix(PREFIX)
    return _path(model, "blobs", text[:2], text)


def _attached_path(model: str, digest: str) -> str:
    return _path(model, "attached", digest.removeprefix(PREFIX))
