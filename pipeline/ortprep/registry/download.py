"""The one way in which files come to this machine: bounded, hashed on the way, continued after a cut.

Sources of models, registries and work stores open a file at an offset. What they say about it then (its size
and version) decides whether what an earlier try left is the beginning of the same file.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from ortprep.bundle.digest import PREFIX, DigestCache
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import IntegrityError, RegistryError, RegistryUnavailableError
from ortprep.registry.backend import BLOCK_BYTES, Download
from ortprep.registry.transfer import ATTEMPTS, check_copied, read_blocks, wait_to_retry
from ortprep.time_limit import check_time

log = logging.getLogger(__name__)

OpenAt = Callable[[int, str | None], AbstractContextManager[Download]]
"""Opens a file at an offset in bytes, or at its beginning if it no longer has that version."""

ByteProgress = Callable[[int, int | None], None]
"""Takes the bytes that are there and the size of the whole file, None where nobody knows it."""


MAX_BYTES = 2**40
"""Size of the largest file, in bytes, where nothing smaller is asked for."""


class _PartialFile:
    """The beginning of a file, on disk, with its running digest."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size_bytes = file.tell()
        for block in read_blocks(path) if self.size_bytes else ():
            self._hash.update(block)

    def append(self, block: bytes | memoryview) -> None:
        self._file.write(block)
        self._hash.update(block)
        self.size_bytes += len(block)

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    @property
    def digest(self) -> str:
        return PREFIX + self._hash.hexdigest()


def download(
    open_at: OpenAt,
    path: Path,
    *,
    name: str,
    expected: FileEntry | None = None,
    max_bytes: int = MAX_BYTES,
    attempts: int = ATTEMPTS,
    progress: ByteProgress | None = None,
) -> FileEntry:
    """Copies a file to `path`, going on after what is there as long as the source has the same file.

    Args:
        open_at: Opens the file.
        path: The new file. Bytes that it has already count only if `expected` is given.
        name: The file as it may be shown: without credentials.
        expected: The file's size and digest, where they are known before.
        max_bytes: Size of the largest file, in bytes.
        attempts: Number of tries in a row that may bring no block.
        progress: Takes how much is there, after every block.

    Returns:
        What was written, under `name`.

    Raises:
        RegistryUnavailableError: The source did not answer, or broke off, several times in a row.
        RegistryError: The file is not there, or is too large.
        IntegrityError: It has other bytes than `expected`.
        OSError: `path` cannot be written.
        Exception: What `check_time` raises, once the time of the caller is over.
    """
    failures, version = 0, None
    with path.open("wb" if expected is None else "ab") as file:
        partial = _PartialFile(path, file)
        if expected is not None and partial.size_bytes > expected.size_bytes:
            partial.restart()
        # A file that is whole is not asked for: many servers refuse a range that begins at the end.
        while expected is None or not 0 < expected.size_bytes == partial.size_bytes:
            before_bytes = partial.size_bytes
            try:
                with open_at(partial.size_bytes, version) as opened:
                    version = opened.version
                    for _ in _receive(opened, partial, expected):
                        check_time()
                        if partial.size_bytes > max_bytes:
                            raise RegistryError(
                                f"too large: {name}\n  expected at most {max_bytes} bytes, got more"
                            )
                        if progress is not None:
                            progress(partial.size_bytes, opened.size_bytes)
                break
            except RegistryUnavailableError as error:
                check_time()
                gained_bytes = partial.size_bytes - before_bytes
                failures = 1 if gained_bytes >= BLOCK_BYTES else failures + 1
                if failures >= attempts:
                    raise
                wait_to_retry(error, failures)
    if expected is not None:
        check_copied(expected, partial.size_bytes, partial.digest)
    DigestCache().record(path, partial.digest)
    return FileEntry(name, partial.size_bytes, partial.digest)


def _receive(opened: Download, partial: _PartialFile, expected: FileEntry | None) -> Iterator[None]:
    """Appends block after block, and yields after each.

    Raises:
        IntegrityError: There are more bytes than expected.
        RegistryUnavailableError: The file changed on its way.
    """
    if opened.start != partial.size_bytes:
        log.debug("starting again: the file changed, or its server cannot resume a download")
        partial.restart()
    yield
    for block in opened.blocks:
        partial.append(block)
        if expected is not None and partial.size_bytes > expected.size_bytes:
            raise IntegrityError(
                f"too many bytes for {expected.path}\n  expected {expected.size_bytes} bytes, got more"
            )
        yield
    if opened.sha256 not in (None, partial.digest):
        got = partial.digest
        partial.restart()
        raise RegistryUnavailableError(f"other bytes arrived\n  expected {opened.sha256}, got {got}")
