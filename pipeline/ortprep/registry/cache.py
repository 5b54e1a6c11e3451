"""The cache of pulled files on this machine: bounded, shared by all processes, and enough to work offline.

    ROOT/files/HE/HEX, documents/HEX    by digest, checked before they are stored
    ROOT/names/HEX                      digests that a reference named when it was last resolved
    ROOT/bundles/KEY/                   bundles that `load` opens, hard links of the files
    ROOT/locks/                         one process at a time writes a file

Everything can be fetched again, so nothing is synced to disk. Its content is trusted, so only its user may be
able to write to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ortprep.bundle.atomic import TEMP_PREFIX, write_bytes_atomic
from ortprep.bundle.digest import PREFIX, DigestCache, digest_bytes, digest_json
from ortprep.bundle.file_memory import require_cache_folder, require_private_folder
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import IntegrityError
from ortprep.registry.documents import MAX_DOCUMENT_BYTES
from ortprep.transport.time_limit import check_time
from ortprep.transport.transfer import OpenAt, Report, download, read_limit

log = logging.getLogger(__name__)

LIMIT_VARIABLE = "ORTPREP_CACHE_BYTES"
DEFAULT_LIMIT_BYTES = 50 * 2**30
GRACE_S = 3600.0
"""Time in seconds for which a used file stays: a job may be about to open it."""

_LOCK_POLL_INTERVAL_S = 0.05
_LISTED = ("files", "documents", "names")


class Cache:
    """The cache in a folder.

    Args:
        root: The folder; None for `$ORTPREP_CACHE_DIR/registry`, else the user's XDG cache folder.
        limit_bytes: Largest size; None for `$ORTPREP_CACHE_BYTES`, else 50 GiB.

    Raises:
        CacheError: The folder cannot be made, or others could change what is in it.
        RegistryError: The limit is no number.
    """

    def __init__(self, root: Path | None = None, *, limit_bytes: int | None = None) -> None:
        self.root = Path(require_cache_folder("registry") if root is None else root)
        self.limit_bytes = (
            read_limit(LIMIT_VARIABLE, DEFAULT_LIMIT_BYTES) if limit_bytes is None else limit_bytes
        )
        for name in (".", "files", "documents", "names", "bundles", "locks"):
            require_private_folder(os.path.normpath(self.root / name))

    def read_document(self, digest: str) -> bytes | None:
        """Returns a document, checked, None if it is not here."""
        path = self.root / "documents" / digest.removeprefix(PREFIX)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_DOCUMENT_BYTES + 1)
        except OSError:
            return None
        _mark_used(path)
        return data if digest_bytes(data) == digest else None

    def write_document(self, data: bytes) -> None:
        """Keeps a document."""
        digest = digest_bytes(data)
        if self.read_document(digest) is None:
            path = self.root / "documents" / digest.removeprefix(PREFIX)
            with contextlib.suppress(OSError):
                write_bytes_atomic(path, data, durable=False)

    def remember(self, key: object, digests: Sequence[str]) -> None:
        """Keeps which digests a key, of JSON types, stands for now."""
        with contextlib.suppress(OSError):
            write_bytes_atomic(self._name_path(key), "\n".join(digests).encode(), durable=False)

    def recall(self, key: object) -> tuple[tuple[str, ...], float]:
        """Returns the digests that a key stood for last, and when, in seconds since 1970; none if never."""
        path = self._name_path(key)
        try:
            return tuple(path.read_text(encoding="ascii").split()), path.stat().st_mtime
        except (OSError, ValueError):
            return (), 0.0

    def _name_path(self, key: object) -> Path:
        return self.root / "names" / digest_json(key).removeprefix(PREFIX)

    def fetch_file(self, entry: FileEntry, open_at: OpenAt, report: Report) -> Path:
        """Returns a file with these bytes, fetching it unless it is here.

        What was fetched before a process was killed is kept, and the rest is asked for at its offset.

        Raises:
            IntegrityError: The registry has other bytes; they are not kept.
            RegistryError: The registry failed, several times.
            OSError: The disk is full.
        """
        path = self._file_path(entry.sha256)
        with _locked(self._lock_path("file", entry.sha256)):
            if self.has_file(entry):
                _mark_used(path)
                report(entry.size_bytes)
                return path
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{TEMP_PREFIX}{path.name}")
            reported = 0

            def report_more(done_bytes: int) -> None:
                nonlocal reported
                report(done_bytes - reported)
                reported = done_bytes

            try:
                download(open_at, partial, entry, progress=report_more)
                report_more(entry.size_bytes)
            except IntegrityError:
                partial.unlink(missing_ok=True)
                raise
            # Bundles elsewhere are hard links of it: nobody else may write to it, whatever the umask says.
            partial.chmod(partial.stat().st_mode & ~0o022)
            partial.replace(path)
            DigestCache().record(path, entry.sha256)
        return path

    def has_file(self, entry: FileEntry) -> bool:
        """Says whether a file with these bytes is here."""
        path = self._file_path(entry.sha256)
        try:
            return path.stat().st_size == entry.size_bytes and DigestCache().digest(path) == entry.sha256
        except OSError:
            return False

    def _file_path(self, digest: str) -> Path:
        text = digest.removeprefix(PREFIX)
        return self.root / "files" / text[:2] / text

    def _lock_path(self, kind: str, key: object) -> Path:
        """Returns one of a bounded number of lock files; none is ever removed."""
        stripe = int(digest_json([kind, key]).removeprefix(PREFIX)[:2], 16)
        return self.root / "locks" / f"{kind}-{stripe:02x}"

    def bundle_path(self, key: str) -> Path:
        """Returns where the bundle of that key is, or would be; marks it as used."""
        path = self.root / "bundles" / key
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    def lock_folder(self, path: Path) -> AbstractContextManager[object]:
        """Locks a folder against other writers on this machine."""
        return _locked(self._lock_path("folder", os.path.realpath(path)))

    def keep(self, path: Path) -> None:
        """Keeps a bundle of this cache until this process ends."""
        lock = self._lock_path("use", path.name)
        if lock in _kept:
            return
        handle = _lock(lock, fcntl.LOCK_SH)
        with _keeping:
            if lock in _kept:
                os.close(handle)  # another thread was sooner
            else:
                _kept[lock] = handle

    def trim(self, *, grace_s: float = GRACE_S) -> int:
        """Removes the least recently used until the cache is within its limit; returns the bytes freed.

        Also removes leftovers of killed pulls. What was used within `grace_s` stays.
        """
        oldest_s = time.time() - grace_s
        with (self.root / "locks" / "trim").open("ab") as trimming:
            if not _try_lock(trimming.fileno()):
                return 0  # another process does it
            before = size_bytes = self._size_bytes()
            for leftover in (self.root / "bundles").glob(f"{TEMP_PREFIX}*"):
                with contextlib.suppress(FileNotFoundError):
                    if leftover.stat().st_mtime < oldest_s:
                        self._remove(leftover)
            # Files that a bundle shares with the cache are one on disk: first the bundle goes, then they.
            while size_bytes > self.limit_bytes and self._remove_oldest(
                size_bytes - self.limit_bytes, oldest_s
            ):
                size_bytes = self._size_bytes()
        if size_bytes < before:
            log.info("removed %d MB from the cache in %s", (before - size_bytes) >> 20, self.root)
        return before - size_bytes

    def _size_bytes(self) -> int:
        files = (file for name in (*_LISTED, "bundles") for file in _list_files(self.root / name))
        return sum({_inode(status): status.st_blocks * 512 for _, status in files}.values())

    def _remove_oldest(self, excess_bytes: int, oldest_s: float) -> bool:
        """Removes the least recently used bundles, and files of no bundle; says whether it did."""
        candidates: list[tuple[float, int, Path]] = []
        linked: set[tuple[int, int]] = set()
        for bundle in (self.root / "bundles").iterdir():
            files = [status for _, status in _list_files(bundle)]
            linked |= set(map(_inode, files))
            with contextlib.suppress(FileNotFoundError):
                candidates.append(
                    (bundle.stat().st_mtime, sum(status.st_blocks * 512 for status in files), bundle)
                )
        for path, status in (file for name in _LISTED for file in _list_files(self.root / name)):
            if _inode(status) not in linked:
                candidates.append((max(status.st_atime, status.st_mtime), status.st_blocks * 512, path))
        removed = False
        for used_s, size_bytes, path in sorted(candidates):
            if excess_bytes > 0 and used_s <= oldest_s and self._remove(path):
                excess_bytes -= size_bytes
                removed = True
        return removed

    def _remove(self, path: Path) -> bool:
        """Removes a file, or a bundle that nobody keeps; says whether it did."""
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return True
        with self._lock_path("use", path.name).open("ab") as use:
            if not _try_lock(use.fileno()):
                return False
            shutil.rmtree(path, ignore_errors=True)
        return True


_kept: dict[Path, int] = {}
"""Open lock files of the bundles that this process uses; the kernel closes them when it ends."""

_keeping = threading.Lock()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock against other processes and threads; waits as `_lock`."""
    handle = _lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)


def _lock(path: Path, mode: int) -> int:
    """Returns an open lock file; waits as long as `limit_time` leaves, then raises its error."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _try_lock(handle, mode):
            check_time()
            time.sleep(_LOCK_POLL_INTERVAL_S)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _try_lock(handle: int, mode: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(handle, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _mark_used(path: Path) -> None:
    """Sets the access time only: the digest cache compares the modification time."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _list_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the files below a folder; others may remove some meanwhile."""
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield Path(root, name), Path(root, name).stat()


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
