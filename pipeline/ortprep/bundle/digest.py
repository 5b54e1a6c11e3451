"""Digests of files, and a cache that spares computing them again for files that did not change."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, BinaryIO

from ortprep.bundle.codec import canonical_json
from ortprep.bundle.file_memory import (
    DIGEST_FOLDER,
    DIGEST_PREFIX,
    Stamp,
    StrPath,
    cache_folder,
    digest_bytes,
    is_digest,
    is_settled,
    new_sha256,
    open_regular,
    read_digest,
    read_stamp,
    write_digest,
)

__all__ = ["PREFIX", "DigestCache", "digest_bytes", "digest_file", "digest_json", "is_digest"]

PREFIX = DIGEST_PREFIX
_BLOCK_BYTES = 256 * 1024


def _carry_on() -> None:
    pass


def digest_json(data: Any) -> str:
    """Returns the digest of the canonical serialisation of JSON data."""
    return digest_bytes(canonical_json(data))


def digest_file(path: StrPath, *, between_blocks: Callable[[], object] = _carry_on) -> str:
    """Returns the digest of a file's bytes; what `between_blocks` raises ends the reading.

    Raises:
        OSError: The file cannot be read, is no regular file, or has more bytes than its size says.
    """
    with open_regular(path) as file:
        return _digest_open(file, between_blocks)


def _digest_open(file: BinaryIO, between_blocks: Callable[[], object]) -> str:
    """Returns the digest of an open file; raises `OSError` if it has more bytes than its size says."""
    left_bytes = os.fstat(file.fileno()).st_size
    hasher, block = new_sha256(left_bytes), memoryview(bytearray(_BLOCK_BYTES))
    while count := file.readinto(block):  # type: ignore[attr-defined]
        hasher.update(block[:count])
        between_blocks()
        left_bytes -= count
        if left_bytes < 0:  # files of /proc have no size, and some of them no end
            raise OSError(errno.EFBIG, "more bytes than its size says")
    return f"{PREFIX}{hasher.hexdigest()}"


class DigestCache:
    """Remembers digests by inode, so that a file is hashed once however often it is checked.

    One small file per inode: looking one up costs a load microseconds, hard links share an entry, and writers
    never wait for each other. The cache is an optimisation only: where it cannot be read or written, every
    digest is computed.

    Args:
        folder: Folder of the entries; None for the user's cache folder, if it can be trusted.
        between_blocks: Called after every block that is hashed; what it raises ends the hashing.
    """

    def __init__(
        self, folder: StrPath | None = None, *, between_blocks: Callable[[], object] = _carry_on
    ) -> None:
        self._folder = cache_folder(DIGEST_FOLDER) if folder is None else str(folder)
        self._between_blocks = between_blocks

    def digest(self, path: StrPath) -> str:
        """Returns the digest of the file at `path`, from the cache when its stamp is unchanged.

        Raises:
            OSError: As of `digest_file`.
        """
        # One open file throughout: were the path looked up again, another file's digest could be remembered.
        with open_regular(path) as file:
            stamp = read_stamp(file.fileno())
            remembered = read_digest(stamp, self._folder)
            if remembered is not None:
                return remembered
            settled = is_settled(stamp)
            digest = _digest_open(file, self._between_blocks)
            unchanged = read_stamp(file.fileno()) == stamp
        if unchanged and settled:
            self._store(stamp, digest)
        return digest

    def record(self, path: StrPath, digest: str) -> None:
        """Remembers a digest that the caller, the file's only writer, computed while writing it.

        Raises:
            OSError: There is no such file.
        """
        self._store(read_stamp(path), digest)

    def _store(self, stamp: Stamp, digest: str) -> None:
        try:
            write_digest(stamp, digest, self._folder)
        except OSError as error:
            import logging  # costs a job milliseconds

            logging.getLogger(__name__).debug("digest cache %s is not usable: %s", self._folder, error)
