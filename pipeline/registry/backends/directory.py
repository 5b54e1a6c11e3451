"""A folder as a registry: on a disk, or on any store that fsspec has a filesystem for.

ROOT/NAME/records/KIND-HEX.json     records
ROOT/NAME/files/HE/HEX              files by digest: versions that share weights store them once
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from pipeline.bundle.atomic import TEMP_PREFIX, sync_folder, write_bytes_atomic
from pipeline.bundle.digest import PREFIX, digest_file
from pipeline.bundle.loader_config import FileEntry
from pipeline.bundle.paths import is_safe_name
from pipeline.bundle.regular_file import open_regular
from pipeline.errors import (
    DISK_ERRORS,
    AccessDeniedError,
    IntegrityError,
    MissingExtraError,
    NotPublishedError,
    RegistryError,
    RegistryUnavailableError,
    hint_of_os_error,
)
from pipeline.registry.backend import BLOCK_BYTES, Block, Report, StoredFile
from pipeline.registry.records import MAX_RECORD_BYTES, MAX_RECORDS, PartRecord, RecordName
from pipeline.registry.retries import with_retries
from pipeline.registry.state import State, Version
from pipeline.registry.transfer import check_copied, copy_blocks, counted, read_blocks
from pipeline.spec.redaction import redact_url

T = TypeVar("T")

_RECORDS, _FILES = "records", "files"
_LEFTOVER_S = 24 * 3600.0
_ALL_OR_NOTHING = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "r2", "oss", "memory"})
"""Stores where an object appears whole or not at all; elsewhere it is renamed into place."""

_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
_PLUGIN_FAILURES = (
    ("botocore.exceptions", "BotoCoreError"),
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
    ("google.auth.exceptions", "GoogleAuthError"),
)
"""What filesystems' own libraries raise, beside the errors of the standard library."""


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
        self._filesystem, self._root = _resolve(url)
        protocol = self._filesystem.protocol
        self._protocols = frozenset({protocol} if isinstance(protocol, str) else protocol)
        self._is_local = "file" in self._protocols

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models, sorted, and of what publishers that were killed left.

        Raises:
            NotPublishedError: There is no such folder.
        """
        if self._is_local and not Path(self._root).is_dir():
            raise NotPublishedError(f"no registry there: {self._name}\n  expected a folder, got none")
        names = sorted(name for name in self._list(self._root) if is_safe_name(name))
        return tuple(name for name in names if {_RECORDS, _FILES} & set(self._list(self._path(name))))

    def list_records(self, model: str) -> tuple[RecordName, ...]:
        """Returns the names of a model's records."""
        names = self._list(self._path(model, _RECORDS))
        parsed = (RecordName.parse(name.removesuffix(".json")) for name in names)
        found = tuple(sorted(name for name in parsed if name is not None))
        if len(found) > MAX_RECORDS:
            raise RegistryError(
                f"too many records of {model} in {self._name}\n  expected at most {MAX_RECORDS}"
            )
        return found

    def read_record(self, model: str, name: RecordName) -> bytes:
        """Returns a record's bytes, unchecked."""
        path = self._record_path(model, name)

        def read() -> bytes:
            with open_regular(Path(path)) if self._is_local else self._filesystem.open(path, "rb") as file:
                data: bytes = file.read(MAX_RECORD_BYTES + 1)
            return data

        return self._try(read, f"record {name} of {model}")

    def write_record(self, model: str, name: RecordName, data: bytes) -> None:
        """Writes a record; it is listed once it is there whole."""
        path = self._record_path(model, name)
        if self._is_local:
            self._try(lambda: write_bytes_atomic(Path(path), data), f"record {name} of {model}")
        else:
            self._try(lambda: self._put(path, lambda target: self._filesystem.pipe_file(target, data)), path)

    def delete_record(self, model: str, name: RecordName) -> None:
        """Removes a record."""
        self._delete(self._record_path(model, name))

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
        path = self._file_path(model, entry.sha256)
        if self._is_local:
            self._try(lambda: _copy_into_place(source, Path(path), entry, report), entry.path)
            return

        def put(target: str) -> None:
            # Hashed before, since what a store has taken cannot be looked at while it is written.
            check_copied(entry, source.stat().st_size, digest_file(source))
            self._filesystem.put_file(str(source), target)

        self._try(lambda: self._put(path, put), f"{entry.path} of {model}")
        report(entry.size_bytes)

    def finish_part(self, model: str, part: PartRecord) -> None:
        """Does nothing: a part is its files."""

    @contextmanager
    def open_file(
        self,
        model: str,
        part: PartRecord,  # noqa: ARG002 - files of all parts lie together
        entry: FileEntry,
        offset: int,
    ) -> Iterator[Iterator[Block]]:
        """Yields the blocks of a file from `offset` on, unchecked."""
        path, what = self._file_path(model, entry.sha256), f"{entry.path} of {model}"
        if self._is_local:
            yield self._guard(read_blocks(Path(path), offset), what)
            return
        with self._try(lambda: self._filesystem.open(path, "rb", cache_type="readahead"), what) as file:
            file.seek(offset)
            yield self._guard(iter(lambda: file.read(16 * BLOCK_BYTES), b""), what)

    def _guard(self, blocks: Iterator[Block], what: str) -> Iterator[Block]:
        """Yields blocks; what goes wrong with reading them, and that alone, is the registry's error."""
        while True:
            with self._translated(what):
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def list_files(self, model: str) -> tuple[StoredFile, ...]:
        """Returns all files of a model."""
        folder = self._path(model, _FILES)

        def find() -> dict[str, dict[str, Any]]:
            self._filesystem.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._filesystem.find(folder, detail=True)
            return found

        try:
            found = self._try(find, folder)
        except NotPublishedError:
            return ()
        named = {path.rsplit("/", 1)[-1]: info for path, info in found.items()}
        return tuple(
            StoredFile(PREFIX + name, int(info.get("size") or 0))
            for name, info in sorted(named.items())
            if len(name) == 64
        )

    def delete_files(self, model: str, digests: Sequence[str]) -> None:
        """Removes files; of none, what uploads left that broke off more than a day ago."""
        for digest in digests:
            self._delete(self._file_path(model, digest))
        if not digests and self._is_local:
            for leftover in Path(self._path(model, _FILES)).glob(f"*/{TEMP_PREFIX}*"):
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

    @property
    def _name(self) -> str:
        return redact_url(self.url)

    def _path(self, model: str, *parts: str) -> str:
        if not is_safe_name(model):
            raise RegistryError(f"no name of a model: {model[:80]!r}")
        return "/".join((self._root, model, *parts))

    def _record_path(self, model: str, name: RecordName) -> str:
        return self._path(model, _RECORDS, f"{name}.json")

    def _file_path(self, model: str, digest: str) -> str:
        text = digest.removeprefix(PREFIX)
        return self._path(model, _FILES, text[:2], text)

    def _list(self, folder: str) -> list[str]:
        def names() -> list[str]:
            self._filesystem.invalidate_cache()
            found: list[str] = self._filesystem.ls(folder, detail=False)
            return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

        try:
            return self._try(names, folder)
        except NotPublishedError:
            return []

    def _put(self, path: str, put: Callable[[str], object]) -> None:
        if self._protocols & _ALL_OR_NOTHING:
            put(path)
            return
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/{TEMP_PREFIX}{name}~{os.urandom(8).hex()}"
        self._filesystem.makedirs(folder, exist_ok=True)
        put(temporary)
        self._filesystem.mv(temporary, path)

    def _delete(self, path: str) -> None:
        with suppress(NotPublishedError):
            self._try(lambda: self._filesystem.rm_file(path), path)

    def _try(self, action: Callable[[], T], what: str) -> T:
        def translated() -> T:
            with self._translated(what):
                return action()

        return with_retries(translated)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        failures: tuple[type[Exception], ...] = (
            OSError,
            ValueError,
            RuntimeError,
            EOFError,
            *_plugin_failures(),
        )
        try:
            yield
        except failures as error:
            raise self._translate(error, what) from error

    def _translate(self, error: Exception, what: str) -> Exception:
        where = f"{what.removeprefix(self._root + '/')} in {self._name}"
        reason = getattr(error, "strerror", None) or type(error).__name__
        if isinstance(error, FileNotFoundError):
            return NotPublishedError(f"not in the registry: {where}")
        if isinstance(error, PermissionError):
            return AccessDeniedError(
                f"no permission: {where}\n  {reason}",
                hint="the filesystem takes credentials from its usual environment variables and files",
            )
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            return RegistryError(
                f"cannot write {where}\n  {reason}", hint=hint_of_os_error(error, self._root)
            )
        if self._is_local or isinstance(error, _FINAL):
            return RegistryError(f"the registry failed: {where}\n  {reason}")
        return RegistryUnavailableError(f"the registry failed: {where}\n  {reason}")


def _resolve(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtraError(
            "fsspec is not installed\n  expected it for registries", hint="pip install 'ortprep[registry]'"
        ) from error
    name = redact_url(url)
    try:
        # Listings must be true at the time they are asked for.
        filesystem, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise MissingExtraError(f"no filesystem for {name}\n  {error}") from error
    except ValueError as error:
        raise RegistryError(
            f"no such kind of registry: {name}\n"
            "  expected a folder, an fsspec URL, oci://… or mlflow+http://…"
        ) from error
    return filesystem, root.rstrip("/")


def _plugin_failures() -> tuple[type[Exception], ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in _PLUGIN_FAILURES)
    return tuple(kind for kind in found if kind is not None)


def _copy_into_place(source: Path, destination: Path, entry: FileEntry, report: Report) -> None:
    """Copies a file by way of a temporary one, going on with what a killed publisher left of it."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f"{TEMP_PREFIX}{destination.name}~partial")
    with temporary.open("a+b") as file, counted(report) as count:
        if _is_ours(file, temporary):
            _copy_rest(source, file, entry, count)
        else:
            # Another publisher is at it, or the file system has no locks: whoever is first puts it there.
            temporary = destination.with_name(f"{TEMP_PREFIX}{destination.name}~{os.urandom(8).hex()}")
            with temporary.open("x+b") as own:
                _copy_rest(source, own, entry, count)
        temporary.replace(destination)
    sync_folder(destination.parent)


def _is_ours(file: IO[bytes], path: Path) -> bool:
    """Takes the right to write an open file; not of one that was put in its place since it was opened."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False


def _copy_rest(source: Path, file: IO[bytes], entry: FileEntry, report: Report) -> None:
    seen, offset = hashlib.sha256(), 0
    for old, new in zip(read_blocks(Path(file.name)), read_blocks(source), strict=False):
        if old != new:
            break
        seen.update(old)
        offset += len(old)
    file.truncate(offset)
    file.seek(offset)
    report(offset)
    try:
        copy_blocks(read_blocks(source, offset), file, entry, report, seen=seen)
        file.flush()
        os.fsync(file.fileno())
    except IntegrityError:
        Path(file.name).unlink(missing_ok=True)
        raise
