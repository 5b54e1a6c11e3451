"""A folder as a registry: on a disk or an object store.

ROOT/NAME/versions/HEX.LABEL                documents by their digests, with what `ref_name` adds
ROOT/NAME/parts/HEX
ROOT/NAME/signatures/HEX.PART
ROOT/NAME/aliases/ALIAS, previous/ALIAS     digests of the version that an alias names, and named before
ROOT/NAME/blobs/HE/HEX                      files by digest: versions that share weights store them once
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from ortprep.bundle.atomic import TEMP_PREFIX
from ortprep.bundle.digest import PREFIX, digest_bytes, is_digest
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import NotPublishedError
from ortprep.registry.backend import (
    POINTERS,
    Backend,
    Kind,
    SweepResult,
    check_count,
    digests_of,
    ref_name,
    subject_digits,
)
from ortprep.registry.documents import Part
from ortprep.registry.versions import check_model_name
from ortprep.transport.fsspec_folder import FsspecFolder
from ortprep.transport.transfer import Download, map_parallel

_LEFTOVER_S = 24 * 3600.0
_FRESH_S = 3600.0
"""Age up to which a file need not be refreshed."""

_BLOBS = "blobs"
_MAX_ALIAS_BYTES = 100
_SWEPT_NAME = re.compile(rf"({re.escape(TEMP_PREFIX)})?[0-9a-f]{{64}}(\.[0-9a-f]{{32}})?(~[0-9a-f]{{16}})?")
"""Names of the files that a collection may remove: those of parts, signatures, blobs, and unfinished ones."""


class DirectoryBackend(Backend):
    """A registry in a folder, by its path or fsspec URL; raises as `FsspecFolder`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._folder = FsspecFolder(url)

    def has_file(self, part: Part, entry: FileEntry) -> bool:
        path = _file_path(part.model, entry)
        file = self._folder.describe_file(path)
        if file is None or file.size_bytes != entry.size_bytes:
            return False
        with suppress(NotPublishedError):  # swept since it was looked for
            return time.time() - file.modified_s < _FRESH_S or self._folder.refresh(path)
        return False

    def open_file(self, part: Part, entry: FileEntry, offset: int = 0) -> AbstractContextManager[Download]:
        return self._folder.open(_file_path(part.model, entry), offset, name=entry.path)

    def put_file(self, part: Part, entry: FileEntry, source: Path) -> None:
        self._folder.upload(_file_path(part.model, entry), entry, source)

    def open_ref(self, model: str, kind: Kind, name: str) -> AbstractContextManager[Download]:
        return self._folder.open(_path(model, kind, name), 0, name=f"{kind}/{name}")

    def list_refs(self, model: str, kind: Kind) -> Mapping[str, str]:
        folder = _path(model, kind)
        listed = [name for name in self._folder.list_names(folder) if is_safe_name(name)]
        if kind not in POINTERS:
            return digests_of(listed)
        check_count(len(listed), f"{kind} of {model}")

        def read(name: str) -> str:
            with suppress(NotPublishedError):  # removed since it was listed
                data = self._folder.read(f"{folder}/{name}", limit_bytes=_MAX_ALIAS_BYTES)
                return data.decode("ascii", errors="replace").strip()
            return ""

        return {name: text for name, text in map_parallel(read, listed).items() if is_digest(text)}

    def put_ref(self, model: str, kind: Kind, name: str, data: bytes) -> None:
        self._folder.write(
            _path(model, kind, name), digest_bytes(data).encode() if kind in POINTERS else data
        )

    def delete_version(self, model: str, name: str) -> None:
        self._folder.delete(_path(model, Kind.VERSION, name))

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models, sorted, and of what publishers that were killed left."""
        if self._folder.is_absent():
            raise NotPublishedError(f"no registry found: {self._folder.name}\n  expected a folder, got none")
        names = sorted(name for name in self._folder.list_names("") if is_safe_name(name))
        return tuple(name for name in names if {Kind.VERSION, _BLOBS} & set(self._folder.list_names(name)))

    def sweep(self, model: str, live: Collection[Part], *, grace_s: float, dry_run: bool) -> SweepResult:
        blobs = {_file_path(model, entry) for part in live for entry in part.files}
        documents = {_path(model, Kind.PART, ref_name(part.digest)) for part in live}
        subjects = {subject_digits(part.digest) for part in live}
        signed = {
            _path(model, Kind.SIGNATURE, name)
            for name in self._folder.list_names(_path(model, Kind.SIGNATURE))
            if name.partition(".")[2] in subjects
        }
        self._sweep(_path(model, Kind.SIGNATURE), signed, grace_s, dry_run=dry_run)
        parts = self._sweep(_path(model, Kind.PART), documents, grace_s, dry_run=dry_run)
        files = self._sweep(_path(model, _BLOBS), blobs, grace_s, dry_run=dry_run)
        digests = tuple(PREFIX + path.rpartition("/")[2] for path in parts)
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
                gone[path] = file.size_bytes or 0
            if not dry_run:
                self._folder.delete(path)
        return gone


def _path(model: str, *parts: str) -> str:
    return "/".join((check_model_name(model), *parts))


def _file_path(model: str, entry: FileEntry) -> str:
    text = entry.sha256.removeprefix(PREFIX)
    return _path(model, _BLOBS, text[:2], text)
