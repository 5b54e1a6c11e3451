"""A folder on a disk or an object store; files appear whole or not at all."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from ortprep.bundle.atomic import new_file
from ortprep.bundle.digest import digest_file
from ortprep.bundle.file_memory import open_regular
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import (
    DISK_ERRORS,
    AccessDeniedError,
    MissingExtraError,
    NotPublishedError,
    RegistryError,
    RegistryUnavailableError,
    hint_of_os_error,
)
from ortprep.spec.urls import check_url, redact_url
from ortprep.transport.time_limit import OutOfTimeError, call_in_time, check_time, remaining_s
from ortprep.transport.transfer import (
    BLOCK_BYTES,
    Block,
    Download,
    check_copied,
    copy_blocks,
    read_blocks,
    with_retries,
)
from ortprep.versions import install_command

T = TypeVar("T")

_PLUGIN_FAILURES = (
    ("botocore.exceptions", "BotoCoreError"),
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
    ("google.auth.exceptions", "GoogleAuthError"),
)
"""What filesystems' own libraries raise, beside the errors of the standard library."""

_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "created")
"""What filesystems call the time of the last write."""

_FINAL = (IsADirectoryError, NotADirectoryError, NotImplementedError)
_UNREACHABLE = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN})
"""What `OSError.errno` is when a mounted folder does not answer."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a folder.

    Attributes:
        size_bytes: Its size, None if the store does not say.
        modified_s: Time of the last write, in seconds since 1970; infinite if the store does not say.
    """

    size_bytes: int | None
    modified_s: float


class FsspecFolder:
    """A folder by its absolute path or fsspec URL; paths are relative to it, with `/`.

    Methods may be called from several threads at once, try again while the store is unavailable, and raise
    what those of `Backend` do. `open` tries once: its caller knows where to go on.

    Raises:
        RegistryError: The URL is not one that `check_url` allows for a store.
        MissingExtraError: The filesystem's package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.name = redact_url(url)
        """The URL, fit to be shown."""
        self._filesystem, self._root = _resolve(url)
        protocol = self._filesystem.protocol
        self._protocols = frozenset({protocol} if isinstance(protocol, str) else protocol)
        self._is_local = "file" in self._protocols

    def is_absent(self) -> bool:
        """Says whether the folder is known not to be there; many stores know no empty folders."""
        return self._is_local and not Path(self._root).is_dir()

    def list_names(self, folder: str) -> list[str]:
        """Returns the names of what is in a folder below; none for one that is not there."""
        paths = self._ask(lambda: self._filesystem.ls(self._locate(folder), detail=False), folder, [])
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]

    def find(self, folder: str) -> Mapping[str, StoredFile]:
        """Returns the files below a folder, by their paths; on a disk those of two levels."""
        # Somebody's thousand folders in each other would be too deep for fsspec; stores have no folders.
        options: dict[str, Any] = {"detail": True, "maxdepth": 2 if self._is_local else None}
        files = self._ask(lambda: self._filesystem.find(self._locate(folder), **options), folder, {})
        start = len(self._locate("")) + 1
        return {path[start:]: _stored_file(info) for path, info in files.items()}

    def describe_file(self, path: str) -> StoredFile | None:
        """Returns what the store says of a file, None without one; raises RegistryError for a folder."""

        def describe() -> StoredFile:
            info = self._filesystem.info(self._locate(path))
            if info.get("type") == "directory":
                raise IsADirectoryError
            return _stored_file(info)

        found: StoredFile | None = self._ask(describe, path, None)
        return found

    def _ask(self, action: Callable[[], Any], what: str, default: object) -> Any:
        try:
            return self._try(action, what)
        except NotPublishedError:
            return default

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Returns a file's bytes, never more than a limit and one."""

        def read() -> bytes:
            with self._inside(path) as place, self._open(place) as file:
                data: bytes = file.read(limit_bytes + 1)
            return data

        return self._try(read, path)

    def write(self, path: str, data: bytes) -> None:
        """Writes a file; readers see what was there before or all of this."""
        self._put(
            path, path, lambda file: file.write(data), lambda place: self._filesystem.pipe_file(place, data)
        )

    def refresh(self, path: str) -> bool:
        """Makes a file count as written just now, where the store can do that; says whether it did."""
        if not self._is_local and not self._protocols & {"s3", "s3a"}:
            return False

        def refresh() -> None:
            with self._inside(path) as place:
                if self._is_local:
                    os.utime(place, follow_symlinks=False)
                else:
                    self._filesystem.cp_file(place, place, MetadataDirective="REPLACE")

        self._try(refresh, path)
        return True

    def upload(self, path: str, entry: FileEntry, source: Path) -> None:
        """Uploads a file; raises IntegrityError if `source` has other bytes than `entry` describes."""

        def copy(file: IO[bytes]) -> None:
            copy_blocks(read_blocks(source), file, entry)

        def put(place: str) -> None:
            # Hashed before, since what a store has taken cannot be looked at while it is written.
            check_copied(entry, source.stat().st_size, digest_file(source))
            self._filesystem.put_file(str(source), place)

        self._put(path, entry.path, copy, put)

    def _put(
        self,
        path: str,
        what: str,
        write: Callable[[IO[bytes]], object],
        put: Callable[[str], object],
    ) -> None:
        """Writes a file whole or not at all: on a disk by way of another, elsewhere in one step."""

        def act() -> None:
            with self._inside(path, make_folder=True) as place:
                if self._is_local:
                    with new_file(Path(place)) as file:  # a killed publisher leaves it to the next collection
                        write(file)
                else:
                    put(place)

        self._try(act, what)

    @contextmanager
    def open(self, path: str, offset: int, *, name: str) -> Iterator[Download]:
        """Opens a file at an offset; messages call it `name`."""
        with ExitStack() as stack:
            with self._translated(name):
                place = stack.enter_context(self._inside(path))
                file = stack.enter_context(self._in_time(lambda: self._open(place), name))
            if self._is_local:
                blocks: Iterator[Block] = read_blocks(Path(f"/proc/self/fd/{file.fileno()}"), offset)
            else:
                file.seek(offset)
                blocks = iter(lambda: self._in_time(lambda: file.read(16 * BLOCK_BYTES), name), b"")
            yield Download(self._guard(blocks, name), offset)

    def _open(self, place: str) -> IO[bytes]:
        if self._is_local:
            return open_regular(place, os.O_NOFOLLOW)
        file: IO[bytes] = self._filesystem.open(place, "rb", cache_type="readahead")
        return file

    def delete(self, path: str) -> None:
        """Removes a file, or a link in its place; one that is not there is fine."""

        def delete() -> None:
            with self._inside(path, may_be_link=True) as place:
                self._filesystem.rm_file(place)

        with suppress(NotPublishedError):
            self._try(delete, path)

    @contextmanager
    def _inside(self, path: str, *, make_folder: bool = False, may_be_link: bool = False) -> Iterator[str]:
        """Yields the place of a file; on a disk below an open folder: nobody can put a link there."""
        *folders, name = path.split("/")
        self._locate("/".join(folders) if may_be_link else path)
        if not self._is_local:
            yield f"{self._root}/{path}"
            return
        if make_folder:
            Path(self._root or "/").mkdir(parents=True, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        handle = os.open(self._root or "/", flags)
        try:
            for folder in folders:
                if make_folder:
                    with suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=handle)
                outer, handle = handle, os.open(folder, flags | os.O_NOFOLLOW, dir_fd=handle)
                os.close(outer)
            yield f"/proc/self/fd/{handle}/{name}"
        finally:
            os.close(handle)

    def _locate(self, path: str) -> str:
        """Returns the place of a path; raises RegistryError if there is a link on the way, on a disk."""
        place = f"{self._root}/{path}" if path else self._root
        root = Path(os.path.realpath(self._root or "/"))
        if self._is_local and path and Path(os.path.realpath(place)) != root / path:
            raise RegistryError(
                f"a link in the registry: {path} in {self.name}\n"
                "  expected only files and folders below its root, which may itself be a link"
            )
        return place

    def _guard(self, blocks: Iterator[Block], what: str) -> Iterator[Block]:
        """Yields blocks; what goes wrong with reading them, and that alone, is the registry's error."""
        while True:
            with self._translated(what):
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def _try(self, action: Callable[[], T], what: str) -> T:
        def translated() -> T:
            with self._translated(what):
                return action()

        return with_retries(lambda: self._in_time(translated, what))

    def _in_time(self, action: Callable[[], T], what: str) -> T:
        """Does one thing, and gives a store no more time than `limit_time` leaves: a list may never end."""
        if self._is_local or math.isinf(remaining_s()):
            return action()
        try:
            return call_in_time(action, remaining_s())
        except OutOfTimeError as error:
            check_time()
            raise RegistryUnavailableError(
                f"the registry failed: {what} in {self.name}\n  {error}"
            ) from error

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Turns the failures of a filesystem and its libraries into errors of registries."""
        where = f"{what} in {self.name}" if what else self.name
        # A fault of this package is none of these: it is neither retried nor called the registry's.
        failures: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, EOFError)
        try:
            yield
        except FileNotFoundError as error:
            raise NotPublishedError(f"not in the registry: {where}") from error
        except PermissionError as error:
            raise AccessDeniedError(
                f"no permission: {where}\n  {error.strerror or type(error).__name__}",
                hint="the filesystem takes credentials from its usual environment variables and files",
            ) from error
        except failures + _plugin_failures() as error:
            reason = f"{where}\n  {getattr(error, 'strerror', None) or type(error).__name__}"
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                hint = hint_of_os_error(error, self._root)
                raise RegistryError(f"cannot write {reason}", hint=hint) from error
            is_lasting = self._is_local and getattr(error, "errno", None) not in _UNREACHABLE
            kind = RegistryError if is_lasting or isinstance(error, _FINAL) else RegistryUnavailableError
            raise kind(f"the registry failed: {reason}") from error


def _resolve(url: str) -> tuple[Any, str]:
    """Returns the filesystem of a URL, and the place in it; raises as `FsspecFolder`."""
    name = redact_url(url)
    try:
        import fsspec

        # Listings must be true at the time they are asked for.
        options = {"use_listings_cache": False, "skip_instance_cache": True}
        if Path(url).is_absolute():
            filesystem, root = fsspec.filesystem("file", **options), url
        else:
            check_url(url)
            filesystem, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise MissingExtraError(
            f"no filesystem for {name}\n  {error}", hint=install_command("registry")
        ) from error
    except ValueError as error:
        is_web = url.lower().startswith(("http://", "https://"))
        raise RegistryError(
            f"not a registry: {name}\n  {error}, or begins with oci:// or mlflow+; or a folder's path",
            hint="a web server cannot be one; give a folder or an object store: s3://…" if is_web else None,
        ) from error
    return filesystem, root.rstrip("/")


def _stored_file(info: Mapping[str, Any]) -> StoredFile:
    """Returns what a filesystem says of a file, whichever names it has for that."""
    times = (info.get(name) for name in _TIME_KEYS)
    at = next((time for time in times if isinstance(time, datetime | int | float)), math.inf)
    size = info.get("size")
    return StoredFile(
        None if size is None else int(size),
        at.timestamp() if isinstance(at, datetime) else float(at),
    )


def _plugin_failures() -> tuple[type[Exception], ...]:
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in _PLUGIN_FAILURES)
    return tuple(kind for kind in kinds if kind is not None)
