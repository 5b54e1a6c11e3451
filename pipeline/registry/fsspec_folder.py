"""A folder on a disk or on a store that fsspec has a filesystem for: files appear whole or not at all.

Beyond disks and object stores that rests on the filesystem: fsspec's own `mv` is a copy and a removal.

What goes wrong is told as the registry's errors, after a few tries where another try may help.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from pipeline.bundle.atomic import TEMP_PREFIX, sync_folder, write_bytes_atomic
from pipeline.bundle.digest import digest_file
from pipeline.bundle.loader_config import FileEntry
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
from pipeline.registry.backend import BLOCK_BYTES, Block, Report
from pipeline.registry.retries import with_retries
from pipeline.registry.transfer import check_copied, copy_blocks, counted, read_blocks
from pipeline.spec.redaction import redact_url

T = TypeVar("T")

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


class FsspecFolder:
    """A folder by its URL; paths are relative to it, with `/`.

    Methods may be called from several threads at once, and raise:

        NotPublishedError: What was asked for is not there.
        RegistryUnavailableError: The store cannot be reached, is overloaded, or breaks off.
        AccessDeniedError: It wants other credentials.
        RegistryError: It refuses for another reason.

    Args:
        url: A path, or an fsspec URL.
        called: What it is, for messages.

    Raises:
        RegistryError: No filesystem knows the URL's scheme.
        MissingExtraError: The filesystem's package is not installed.
    """

    def __init__(self, url: str, *, called: str = "registry") -> None:
        self.url = url
        self._called = called
        self._filesystem, self._root = _resolve(url)
        protocol = self._filesystem.protocol
        self._protocols = frozenset({protocol} if isinstance(protocol, str) else protocol)
        self._is_local = "file" in self._protocols

    @property
    def name(self) -> str:
        """The URL, fit to be shown."""
        return redact_url(self.url)

    def is_absent(self) -> bool:
        """Says whether the folder is known not to be there; many stores know no empty folders."""
        return self._is_local and not Path(self._root).is_dir()

    def list_names(self, folder: str) -> list[str]:
        """Returns the names of what is in a folder below; none for one that is not there."""

        def names() -> list[str]:
            self._filesystem.invalidate_cache()
            found: list[str] = self._filesystem.ls(self._locate(folder), detail=False)
            return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

        try:
            return self._try(names, folder)
        except NotPublishedError:
            return []

    def find_sizes(self, folder: str) -> Mapping[str, int]:
        """Returns the sizes in bytes of all files below a folder, by their names without folders."""

        def find() -> dict[str, dict[str, Any]]:
            self._filesystem.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._filesystem.find(self._locate(folder), detail=True)
            return found

        try:
            found = self._try(find, folder)
        except NotPublishedError:
            return {}
        return {path.rsplit("/", 1)[-1]: int(info.get("size") or 0) for path, info in found.items()}

    def size_of(self, path: str) -> int | None:
        """Returns the size of a file in bytes, None if it is not there."""

        def ask() -> int:
            self._filesystem.invalidate_cache()
            return int(self._filesystem.info(self._locate(path))["size"] or 0)

        try:
            return self._try(ask, path)
        except NotPublishedError:
            return None

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Returns a file's bytes, never more than a limit and one."""

        def read() -> bytes:
            place = self._locate(path)
            with open_regular(Path(place)) if self._is_local else self._filesystem.open(place, "rb") as file:
                data: bytes = file.read(limit_bytes + 1)
            return data

        return self._try(read, path)

    def write(self, path: str, data: bytes) -> None:
        """Writes a file; readers see what was there before or all of this."""
        place = self._locate(path)
        if self._is_local:
            self._try(lambda: write_bytes_atomic(Path(place), data), path)
        else:
            self._try(lambda: self._put(place, lambda target: self._filesystem.pipe_file(target, data)), path)

    def upload(self, path: str, entry: FileEntry, source: Path, report: Report) -> None:
        """Uploads a file; what is kept is exactly the bytes that `entry` describes.

        Raises:
            IntegrityError: The file at `source` has other bytes.
        """
        place = self._locate(path)
        if self._is_local:
            self._try(lambda: _copy_into_place(source, Path(place), entry, report), entry.path)
            return

        def put(target: str) -> None:
            # Hashed before, since what a store has taken cannot be looked at while it is written.
            check_copied(entry, source.stat().st_size, digest_file(source))
            self._filesystem.put_file(str(source), target)

        self._try(lambda: self._put(place, put), entry.path)
        report(entry.size_bytes)

    @contextmanager
    def open(self, path: str, offset: int, what: str) -> Iterator[Iterator[Block]]:
        """Yields the blocks of a file from an offset on, unchecked; `what` names it in errors."""
        place = self._locate(path)
        if self._is_local:
            yield self._guard(read_blocks(Path(place), offset), what)
            return
        with self._try(lambda: self._filesystem.open(place, "rb", cache_type="readahead"), what) as file:
            file.seek(offset)
            yield self._guard(iter(lambda: file.read(16 * BLOCK_BYTES), b""), what)

    def delete(self, path: str) -> None:
        """Removes a file; one that is not there is fine."""
        with suppress(NotPublishedError):
            self._try(lambda: self._filesystem.rm_file(self._locate(path)), path)

    def leftovers(self, pattern: str) -> Iterator[Path]:
        """Yields what broken uploads left, by a glob of their names; nothing on a store that keeps none."""
        if self._is_local:
            yield from Path(self._root).glob(pattern)

    def _locate(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _guard(self, blocks: Iterator[Block], what: str) -> Iterator[Block]:
        """Yields blocks; what goes wrong with reading them, and that alone, is the registry's error."""
        while True:
            with self._translated(what):
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def _put(self, path: str, put: Callable[[str], object]) -> None:
        if self._protocols & _ALL_OR_NOTHING:
            put(path)
            return
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/{TEMP_PREFIX}{name}~{os.urandom(8).hex()}"
        self._filesystem.makedirs(folder, exist_ok=True)
        put(temporary)
        self._filesystem.mv(temporary, path)

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
        where = f"{what} in {self.name}" if what else self.name
        reason = getattr(error, "strerror", None) or type(error).__name__
        if isinstance(error, FileNotFoundError):
            return NotPublishedError(f"not in the {self._called}: {where}")
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
            return RegistryError(f"the {self._called} failed: {where}\n  {reason}")
        return RegistryUnavailableError(f"the {self._called} failed: {where}\n  {reason}")


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
