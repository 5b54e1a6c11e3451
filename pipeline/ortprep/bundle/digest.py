"""Digests of files, and a cache that spares computing them again for files that did not change."""

from __future__ import annotations

import _thread
import contextlib
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
    find_stamp,
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
_READ_BYTES = 256 * 1024

BLOCK_BYTES = 8 * 1024 * 1024
"""Size of the blocks of `digest_blocks`, each of which a thread reads into memory: beside other threads of
Python's, blocks of 1 to 16 MiB take the same time within 5 % (459 MB on two cores)."""

_BLOCKS = ".blocks"
_MAX_THREADS = 8
"""SHA-256 takes 0.5 ns per byte with the processor's instructions for it: eight threads read 16 GB/s."""


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


def digest_blocks(path: StrPath, *, threads: int, between_blocks: Callable[[], object] = _carry_on) -> str:
    """Returns the digest of the digests of a file's blocks of `BLOCK_BYTES`, in order; as `BlockDigest`.

    Raises:
        OSError: As of `digest_file`, or the file became shorter.
    """
    with open_regular(path) as file:
        return BlockDigest(file, between_blocks).compute(threads)


def _digest_open(file: BinaryIO, between_blocks: Callable[[], object]) -> str:
    """Returns the digest of an open file; raises `OSError` if it has more bytes than its size says."""
    left_bytes = os.fstat(file.fileno()).st_size
    hasher, block = new_sha256(left_bytes), memoryview(bytearray(_READ_BYTES))
    while count := file.readinto(block):  # type: ignore[attr-defined]
        hasher.update(block[:count])
        between_blocks()
        left_bytes -= count
        if left_bytes < 0:  # files of /proc have no size, and some of them no end
            raise OSError(errno.EFBIG, "more bytes than its size says")
    return f"{PREFIX}{hasher.hexdigest()}"


class BlockDigest:
    """The digest of the digests of an open file's blocks, which any number of threads compute together.

    Args:
        file: The file; it stays open until `compute` returns.
        between_blocks: Called after every block; what it raises ends the hashing.
    """

    def __init__(self, file: BinaryIO, between_blocks: Callable[[], object] = _carry_on) -> None:
        self._handle, self._between_blocks = file.fileno(), between_blocks
        self._size_bytes = os.fstat(self._handle).st_size
        self._offsets = iter(range(0, self._size_bytes, BLOCK_BYTES))
        self._digests: dict[int, bytes] = {}
        self._errors: list[Exception] = []
        self._parts: list[_thread.LockType] = []

    def compute(self, threads: int) -> str:
        """Hashes in so many threads, this one among them, and returns the digest.

        Raises:
            OSError: The file cannot be read, or became shorter.
        """
        blocks = -(-self._size_bytes // BLOCK_BYTES)
        try:
            for _ in range(min(threads, blocks, _MAX_THREADS) - 1):
                with contextlib.suppress(RuntimeError):  # no more threads
                    _thread.start_new_thread(self.take_part, ())
            self.take_part()
        finally:  # the file may be closed then; a thread that is not among them yet finds no block
            for part in self._parts:
                part.acquire()
        if self._errors:
            raise self._errors[0]
        return digest_bytes(b"".join(self._digests[offset] for offset in sorted(self._digests)))

    def take_part(self) -> None:
        """Hashes blocks until none is left that no thread has."""
        part = _thread.allocate_lock()
        part.acquire()
        self._parts.append(part)
        try:
            self._hash_blocks()
        except BaseException as error:  # an interrupt is raised again, and ends the other threads' work too
            for _ in self._offsets:  # nobody needs the others
                pass
            if not isinstance(error, Exception):  # an interrupt, whose block nobody hashed
                self._errors.append(OSError(errno.EINTR, os.strerror(errno.EINTR)))
                raise
            self._errors.append(error)
        finally:
            part.release()

    def _hash_blocks(self) -> None:
        buffer = memoryview(b"")
        for offset in self._offsets:  # each thread takes the next one
            buffer = buffer or memoryview(bytearray(BLOCK_BYTES))
            block, count = buffer[: self._size_bytes - offset], 0
            while count < len(block):  # a network's file system may give less at a time
                read = os.preadv(self._handle, [block[count:]], offset + count)
                if not read:
                    raise OSError(errno.EIO, "fewer bytes than its size says")
                count += read
            hasher = new_sha256(self._size_bytes)
            hasher.update(block)
            self._digests[offset] = hasher.digest()
            self._between_blocks()


class DigestCache:
    """Remembers digests by inode, so that a file is hashed once however often it is checked.

    One small file per inode: looking one up costs a load microseconds, hard links share an entry, and writers
    never wait for each other. The cache is an optimisation only: where it cannot be read or written, every
    digest is computed.

    Args:
        folder: Folder of the entries; None for the user's cache folder, if it can be trusted.
        threads: How many threads hash the blocks of a file; None for one per core.
        between_blocks: Called after every block that is hashed; what it raises ends the hashing.
    """

    def __init__(
        self,
        folder: StrPath | None = None,
        *,
        threads: int | None = None,
        between_blocks: Callable[[], object] = _carry_on,
    ) -> None:
        self._folder = cache_folder(DIGEST_FOLDER) if folder is None else str(folder)
        self._between_blocks = between_blocks
        self._threads = len(os.sched_getaffinity(0)) if threads is None else threads
        self._running: BlockDigest | None = None

    def digest(self, path: StrPath) -> str:
        """Returns the digest of the file at `path`, from the cache when its stamp is unchanged.

        Raises:
            OSError: As of `digest_file`.
        """
        return self._remembered(path, "", _digest_open)

    def digest_blocks(self, path: StrPath) -> str:
        """Returns what the function `digest_blocks` does, as `digest`."""

        def compute(file: BinaryIO, between_blocks: Callable[[], object]) -> str:
            self._running = running = BlockDigest(file, between_blocks)
            return running.compute(self._threads)

        return self._remembered(path, _BLOCKS, compute)

    def take_part(self) -> None:
        """Hashes blocks of the file that another thread has `digest_blocks` hash now, if there is one."""
        if self._running is not None:
            self._running.take_part()

    def recall(self, path: StrPath) -> str | None:
        """Returns the digest of a file if it is known; None for a file that is not there, too."""
        return read_digest(find_stamp(path), self._folder)

    def _remembered(
        self, path: StrPath, kind: str, compute: Callable[[BinaryIO, Callable[[], object]], str]
    ) -> str:
        # One open file throughout: were the path looked up again, another file's digest could be remembered.
        with open_regular(path) as file:
            stamp = read_stamp(file.fileno())
            remembered = read_digest(stamp, self._folder, kind)
            if remembered is not None:
                return remembered
            settled = is_settled(stamp)
            digest = compute(file, self._between_blocks)
            unchanged = read_stamp(file.fileno()) == stamp
        if unchanged and settled:
            self._store(stamp, digest, kind)
        return digest

    def record(self, path: StrPath, digest: str) -> None:
        """Remembers a digest that the caller, the file's only writer, computed while writing it.

        Raises:
            OSError: There is no such file.
        """
        self._store(read_stamp(path), digest)

    def _store(self, stamp: Stamp, digest: str, kind: str = "") -> None:
        try:
            write_digest(stamp, digest, self._folder, kind)
        except OSError as error:
            import logging  # costs a job milliseconds

            logging.getLogger(__name__).debug("digest cache %s is not usable: %s", self._folder, error)
