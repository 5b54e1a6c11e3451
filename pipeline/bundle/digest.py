"""Digests of files, and a cache that spares computing them again for files that did not change."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.bundle.atomic import write_bytes_atomic
from pipeline.bundle.codec import canonical_json
from pipeline.bundle.regular_file import open_regular

log = logging.getLogger(__name__)

PREFIX = "sha256:"
_CLOCK_TICK_NS = 20_000_000
"""File systems stamp changes with a coarse clock: a file that changed just now may do so again unseen."""

_HEX = frozenset("0123456789abcdef")
_BLOCK_BYTES = 256 * 1024
_MAX_ENTRY_BYTES = 256


def _carry_on() -> None:
    pass


def is_digest(text: str) -> bool:
    """Says whether `text` is `sha256:` and 64 lower-case hexadecimal digits."""
    return len(text) == 71 and text.startswith(PREFIX) and set(text[7:]) <= _HEX


def digest_bytes(data: bytes) -> str:
    """Returns the digest of `data` as `sha256:<hex>`."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def digest_json(data: Any) -> str:
    """Returns the digest of the canonical serialisation of JSON data."""
    return digest_bytes(canonical_json(data))


def digest_file(path: Path, *, between_blocks: Callable[[], object] = _carry_on) -> str:
    """Returns the digest of a file's bytes, reading it in blocks.

    Args:
        path: The file.
        between_blocks: Called after every block; what it raises ends the reading.

    Raises:
        OSError: The file cannot be read, or is no regular file.
    """
    with open_regular(path) as file:
        return _digest_open(file, between_blocks)


def _digest_open(file: BinaryIO, between_blocks: Callable[[], object]) -> str:
    hasher, block = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    while count := file.readinto(block):  # type: ignore[attr-defined]
        hasher.update(block[:count])
        between_blocks()
    return PREFIX + hasher.hexdigest()


@dataclass(frozen=True)
class Stamp:
    """What tells that a file did not change since it was hashed, as far as the file system knows.

    The change time is part of it because, unlike the modification time, no program can set it back.
    """

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: Path | int) -> Stamp:
        """Reads the stamp of a file, given by its path, following links, or as an open descriptor.

        Raises:
            OSError: There is no such file.
        """
        s = os.stat(file)  # noqa: PTH116  a path has no `stat` of descriptors
        return cls(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)

    def fields(self) -> list[str]:
        """Returns size, modification and change time as the cache writes them."""
        return [str(self.size_bytes), str(self.mtime_ns), str(self.ctime_ns)]


def default_cache_folder() -> Path:
    """Returns where digests are remembered: `$ORTPREP_CACHE_DIR`, else the user's XDG cache folder."""
    named = os.environ.get("ORTPREP_CACHE_DIR")
    if named:
        return Path(named) / "digests"
    return Path(os.environ.get("XDG_CACHE_HOME") or _home_cache()) / "ortprep" / "digests"


def _home_cache() -> Path:
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        # A user without home, as containers have them: a folder that cannot be made, so nothing is kept.
        return Path(os.devnull)


class DigestCache:
    """Remembers digests by inode, so that a file is hashed once however often it is checked.

    One small file per inode: looking one up costs a load microseconds, hard links share an entry, and writers
    never wait for each other. The cache is an optimisation only: where it cannot be read or written, every
    digest is computed. An entry that another user wrote, root aside, is not believed.

    Args:
        folder: Where entries are kept; None for `default_cache_folder`.
        between_blocks: Called after every block that is hashed; what it raises ends the hashing.
    """

    def __init__(
        self, folder: Path | None = None, *, between_blocks: Callable[[], object] = _carry_on
    ) -> None:
        self._folder = folder or default_cache_folder()
        self._between_blocks = between_blocks

    def digest(self, path: Path) -> str:
        """Returns the digest of the file at `path`, from the cache when its stamp is unchanged.

        Raises:
            OSError: The file cannot be read, or is no regular file.
        """
        # One open file throughout: were the path looked up again, another file's digest could be remembered.
        with open_regular(path) as file:
            stamp = Stamp.of(file.fileno())
            known = self._lookup(stamp)
            if known is not None:
                return known
            digest = _digest_open(file, self._between_blocks)
            unchanged = Stamp.of(file.fileno()) == stamp
        if unchanged and time.time_ns() - stamp.ctime_ns > _CLOCK_TICK_NS:
            self._store(stamp, digest)
        return digest

    def record(self, path: Path, digest: str) -> None:
        """Remembers a digest that the caller, the file's only writer, computed while writing it.

        Raises:
            OSError: There is no such file.
        """
        self._store(Stamp.of(path), digest)

    def _entry(self, stamp: Stamp) -> Path:
        return self._folder / f"{stamp.inode % 256:02x}" / f"{stamp.device:x}-{stamp.inode:x}"

    def _lookup(self, stamp: Stamp) -> str | None:
        try:
            with open_regular(self._entry(stamp)) as file:
                if os.fstat(file.fileno()).st_uid not in (os.geteuid(), 0):
                    return None
                fields = file.read(_MAX_ENTRY_BYTES).decode("ascii").split()
        except (OSError, UnicodeDecodeError):
            return None
        if len(fields) == 4 and fields[:3] == stamp.fields() and is_digest(fields[3]):
            return fields[3]
        return None

    def _store(self, stamp: Stamp, digest: str) -> None:
        entry = self._entry(stamp)
        try:
            write_bytes_atomic(entry, " ".join([*stamp.fields(), digest]).encode(), durable=False)
        except OSError as error:
            log.debug("digest cache %s is not usable: %s", self._folder, error)
