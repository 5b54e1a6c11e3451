"""What was pulled before, on this machine: bounded, shared by all processes, and enough to work offline.

    ROOT/files/HE/HEX          files by digest, checked before they came here
    ROOT/records/KIND-HEX      records, which never change
    ROOT/names/HEX.json        what a reference named when it was last resolved
    ROOT/bundles/KEY/          bundles that `load` opens, hard links of the files
    ROOT/locks/                one process at a time writes a file

It holds nothing that cannot be fetched again, so nothing here is forced to disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from pipeline.bundle.atomic import TEMP_PREFIX, write_bytes_atomic
from pipeline.bundle.codec import canonical_json, decode, encode, read_json
from pipeline.bundle.digest import PREFIX, DigestCache, default_cache_folder, digest_json, is_digest
from pipeline.bundle.loader_config import FileEntry
from pipeline.errors import BundleError, IntegrityError, RegistryError
from pipeline.registry.backend import Block, Report
from pipeline.registry.records import MAX_RECORD_BYTES, PASSING, RecordName
from pipeline.registry.transfer import copy_blocks, counted, read_blocks

log = logging.getLogger(__name__)

LIMIT_VARIABLE = "ORTPREP_CACHE_BYTES"
DEFAULT_LIMIT_BYTES = 50 * 2**30
GRACE_S = 3600.0
"""Seconds for which what was just used is never removed: a job may be about to open it."""

_LOCK_STRIPES = 256
_OLD_RECORD_S = 90 * 24 * 3600.0

OpenAt = Callable[[int], AbstractContextManager[Iterator[Block]]]
"""Opens a file at an offset."""


@dataclass(frozen=True)
class Remembered:
    """What a reference named.

    Attributes:
        version: Digest of the version.
        records: Names of the records that it takes to use it.
        at_s: When that was so, in seconds since 1970.
    """

    version: str
    records: tuple[str, ...]
    at_s: float


class Cache:
    """The cache in a folder.

    Args:
        root: The folder; None for `$ORTPREP_CACHE_DIR/registry`, else the user's XDG cache folder.
        limit_bytes: Largest size; None for `$ORTPREP_CACHE_BYTES`, else 50 GiB.

    Raises:
        RegistryError: The folder cannot be made, or the limit is no number.
    """

    def __init__(self, root: Path | None = None, *, limit_bytes: int | None = None) -> None:
        self.root = root or default_cache_folder().with_name("registry")
        self.limit_bytes = _read_limit() if limit_bytes is None else limit_bytes
        try:
            for name in ("files", "records", "names", "bundles", "locks"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RegistryError(
                f"no cache for what is pulled: {self.root}\n  {error.strerror or error}",
                hint="export ORTPREP_CACHE_DIR=DIR   (a folder that can be written)",
            ) from error

    def read_record(self, name: RecordName) -> bytes | None:
        """Returns a record's bytes, unchecked, None if it is not here."""
        try:
            with (self.root / "records" / str(name)).open("rb") as file:
                return file.read(MAX_RECORD_BYTES + 1)
        except OSError:
            return None

    def write_record(self, name: RecordName, data: bytes) -> None:
        """Keeps a record, unless it is one of those that are soon gone again."""
        if name.kind in PASSING:
            return
        with contextlib.suppress(OSError):
            write_bytes_atomic(self.root / "records" / str(name), data, durable=False)

    def remember(self, registry: str, reference: str, version: str, records: tuple[str, ...]) -> None:
        """Keeps what a reference names now, and which records it takes to use that."""
        data = canonical_json(encode(Remembered(version, records, time.time())))
        with contextlib.suppress(OSError):
            write_bytes_atomic(self._name_path(registry, reference), data, durable=False)

    def recall(self, registry: str, reference: str) -> Remembered | None:
        """Returns what a reference named when it was last resolved, None if it never was."""
        try:
            known = decode(Remembered, read_json(self._name_path(registry, reference)))
        except BundleError:
            return None
        return known if is_digest(known.version) else None

    def _name_path(self, registry: str, reference: str) -> Path:
        key = digest_json([registry, reference]).removeprefix(PREFIX)
        return self.root / "names" / f"{key}.json"

    def fetch_file(self, entry: FileEntry, open_at: OpenAt, report: Report) -> Path:
        """Returns a file with these bytes, fetching it unless it is here.

        What was fetched before a process was killed is kept, and the rest is asked for.

        Args:
            entry: Size and digest.
            open_at: Opens the file in its registry at an offset.
            report: Told how many more bytes are here.

        Raises:
            IntegrityError: The registry has other bytes; they are not kept.
            OSError: The disk is full.
        """
        path = self._file_path(entry.sha256)
        with self._lock(entry.sha256):
            if self._is_intact(path, entry):
                _mark_used(path)
                report(entry.size_bytes)
                return path
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{TEMP_PREFIX}{path.name}")
            try:
                with counted(report) as count:
                    _fetch_rest(partial, entry, open_at, count)
            except IntegrityError:
                partial.unlink(missing_ok=True)
                raise
            partial.replace(path)
            DigestCache().record(path, entry.sha256)
        return path

    def has_file(self, entry: FileEntry) -> bool:
        """Says whether a file with these bytes is here."""
        return self._is_intact(self._file_path(entry.sha256), entry)

    def _is_intact(self, path: Path, entry: FileEntry) -> bool:
        try:
            return path.stat().st_size == entry.size_bytes and DigestCache().digest(path) == entry.sha256
        except OSError:
            return False

    def _file_path(self, digest: str) -> Path:
        text = digest.removeprefix(PREFIX)
        return self.root / "files" / text[:2] / text

    @contextlib.contextmanager
    def _lock(self, digest: str, kind: str = "file") -> Iterator[None]:
        stripe = int(digest.removeprefix(PREFIX)[:8], 16) % _LOCK_STRIPES
        with FileLock(self.root / "locks" / f"{kind}-{stripe:02x}"):
            yield

    def bundle_path(self, key: str) -> Path:
        """Returns where the bundle of that key is, or would be; marks it as used."""
        path = self.root / "bundles" / key
        with contextlib.suppress(OSError):
            os.utime(path)
        return path

    @contextlib.contextmanager
    def making(self, path: Path) -> Iterator[None]:
        """Holds the right to write a folder, as long as nobody does from another machine."""
        digest = digest_json(os.path.realpath(path))
        with self._lock(digest, "folder"):
            yield

    def keep(self, path: Path) -> None:
        """Keeps a bundle of this cache as long as this process lives, whatever else is pulled."""
        use = self._use_path(path)
        with _keeping:
            while use not in _kept:
                handle = os.open(use, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                fcntl.flock(handle, fcntl.LOCK_SH)
                # A `trim` that held it may have removed it: then this lock says nothing to the next one.
                if use.exists() and os.path.samestat(use.stat(), os.fstat(handle)):
                    _kept[use] = handle
                else:
                    os.close(handle)

    def _use_path(self, bundle: Path) -> Path:
        return self.root / "locks" / f"use-{bundle.name}"

    def trim(self, *, grace_s: float = GRACE_S) -> int:
        """Removes what was not used for longest until the cache is within its limit; returns bytes freed.

        A bundle and the cached files that it shares are one file on disk; it takes both to free it. What
        pulls that were killed left goes too, and so do records that were not fetched for a quarter of a year.

        Args:
            grace_s: What was used in the last so many seconds stays, even above the limit.
        """
        with FileLock(self.root / "locks" / "trim"):
            holders = _as_used(list(self._list_items()))
            links: dict[tuple[int, int], set[Path]] = {}
            sizes: dict[tuple[int, int], int] = {}
            for holder in holders:
                for inode, size_bytes in holder.files:
                    links.setdefault(inode, set()).add(holder.path)
                    sizes[inode] = size_bytes
            left, freed = sum(sizes.values()), 0
            for holder in holders:
                is_old = time.time() - holder.used_s >= grace_s
                if not is_old or not (left - freed > self.limit_bytes or holder.is_litter):
                    continue
                if not self._remove(holder.path):
                    continue
                for inode, size_bytes in holder.files:
                    links[inode].discard(holder.path)
                    freed += 0 if links[inode] else size_bytes
            self._remove_old_records()
        if freed:
            log.info("removed %d MB from the cache in %s", freed >> 20, self.root)
        return freed

    def _remove(self, path: Path) -> bool:
        """Removes a file, or a bundle that nobody keeps; says whether it did."""
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return True
        with self._use_path(path).open("ab") as use:
            try:
                fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            shutil.rmtree(path, ignore_errors=True)
            self._use_path(path).unlink(missing_ok=True)
        return True

    def _remove_old_records(self) -> None:
        oldest_s = time.time() - _OLD_RECORD_S
        for folder in ("records", "names"):
            for path in (self.root / folder).iterdir():
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < oldest_s:
                        path.unlink()

    def _list_items(self) -> Iterator[_Holder]:
        for bundle in (self.root / "bundles").iterdir():
            with contextlib.suppress(OSError):
                used_s = bundle.stat().st_mtime
                files = tuple(_inode(path) for path in bundle.rglob("*") if path.is_file())
                yield _Holder(bundle, files, used_s, is_litter=bundle.name.startswith(TEMP_PREFIX))
        for folder in (self.root / "files").iterdir():
            for path in folder.iterdir():
                with contextlib.suppress(OSError):
                    yield _Holder(path, (_inode(path),), _used_s(path), is_litter=False)


_kept: dict[Path, int] = {}
"""Open files whose locks say that this process uses a bundle; the kernel closes them at its end."""

_keeping = threading.Lock()


@dataclass(frozen=True)
class _Holder:
    """A cached file, or a bundle: what keeps some files on disk."""

    path: Path
    files: tuple[tuple[tuple[int, int], int], ...]
    used_s: float
    is_litter: bool


def _as_used(holders: list[_Holder]) -> list[_Holder]:
    """Returns holders by when they were used last: a file is used whenever a bundle that has it is."""
    used_s: dict[tuple[int, int], float] = {}
    for holder in holders:
        for inode, _ in holder.files:
            used_s[inode] = max(used_s.get(inode, 0.0), holder.used_s)
    later = (
        replace(holder, used_s=used_s[holder.files[0][0]]) if holder.path.is_file() else holder
        for holder in holders
    )
    return sorted(later, key=lambda holder: holder.used_s)


def _mark_used(path: Path) -> None:
    """Notes that a file is used, and leaves its modification time: a bundle that shares it is being read."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _used_s(path: Path) -> float:
    status = path.stat()
    return max(status.st_atime, status.st_mtime)


def _inode(path: Path) -> tuple[tuple[int, int], int]:
    status = path.stat()
    return (status.st_dev, status.st_ino), status.st_blocks * 512


def _fetch_rest(partial: Path, entry: FileEntry, open_at: OpenAt, report: Report) -> None:
    with partial.open("ab") as file:
        offset = file.tell()
        if offset > entry.size_bytes:
            file.truncate(0)
            offset = 0
        hasher = hashlib.sha256()
        for block in read_blocks(partial):
            hasher.update(block)
        report(offset)
        with open_at(offset) as blocks:
            copy_blocks(blocks, file, entry, report, seen=hasher)


def _read_limit() -> int:
    text = os.environ.get(LIMIT_VARIABLE)
    if text is None:
        return DEFAULT_LIMIT_BYTES
    if not text.isdecimal():
        raise RegistryError(f"bad {LIMIT_VARIABLE}: {text[:80]!r}\n  expected a number of bytes")
    return int(text)
