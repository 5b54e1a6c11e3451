"""The one way in which files move: bounded, hashed on the way, and tried again.

Registries open a file at an offset, so a download that was cut continues there. The digest of the whole shows
whether the parts fit.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, TypeVar

from ortprep.bundle.digest import PREFIX
from ortprep.bundle.file_memory import open_regular
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import IntegrityError, RegistryError, RegistryUnavailableError
from ortprep.transport.time_limit import check_time, remaining_s

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

Report = Callable[[int], None]
"""Takes a number of transferred bytes; a negative one for bytes that have to be fetched again."""

Block = bytes | memoryview
"""Part of a file; valid until the next one is read."""

BLOCK_BYTES = 256 * 1024
"""Size of the blocks that are read, hashed and written."""

PARALLEL_CALLS = 8
ATTEMPTS = 4
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 30.0


@dataclass(frozen=True)
class Download:
    """An open file of a registry.

    Attributes:
        blocks: The file's bytes from `start` on.
        start: Offset of the first byte: what was asked for, or 0 if the source cannot go on.
    """

    blocks: Iterator[Block]
    start: int


def read_blocks(path: Path, offset: int = 0) -> Iterator[memoryview]:
    """Yields a file's blocks from `offset` on; each is valid until the next one is read.

    One buffer that fits the processor's cache serves for all: new memory for every block takes longer than
    hashing it.
    """
    block = memoryview(bytearray(BLOCK_BYTES))
    with open_regular(path) as file:
        file.seek(offset)
        while count := file.readinto(block):  # type: ignore[attr-defined]
            yield block[:count]


def copy_blocks(blocks: Iterable[Block], file: IO[bytes], entry: FileEntry) -> None:
    """Writes blocks to a file, and checks that together they are what `entry` says.

    Raises:
        IntegrityError: There are more bytes, fewer, or others.
        OSError: The disk is full.
    """
    hasher, size_bytes = hashlib.sha256(), 0
    for block in blocks:
        size_bytes += len(block)
        hasher.update(block)
        file.write(block)
    check_copied(entry, size_bytes, PREFIX + hasher.hexdigest())


def check_copied(entry: FileEntry, size_bytes: int, digest: str) -> None:
    """Raises IntegrityError unless size and digest are those of `entry`."""
    if (size_bytes, digest) != (entry.size_bytes, entry.sha256):
        raise IntegrityError(
            f"other bytes than recorded: {entry.path}\n"
            f"  expected {entry.sha256}, {entry.size_bytes} bytes\n"
            f"  got      {digest}, {size_bytes} bytes"
        )


def map_parallel(action: Callable[[T], R], items: Iterable[T]) -> dict[T, R]:
    """Returns what `action` returns for every item, called for several at a time, in their order.

    The first error is raised. What has begun by then is waited for, so that nothing is written afterwards.
    """
    with ThreadPoolExecutor(PARALLEL_CALLS, thread_name_prefix="ortprep-transfer") as pool:
        context = copy_context()  # of the time limit that the caller has
        futures = {item: pool.submit(context.copy().run, action, item) for item in dict.fromkeys(items)}
        try:
            for future in as_completed(futures.values()):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return {item: future.result() for item, future in futures.items()}


def read_limit(variable: str, default: int) -> int:
    """Returns the number in an environment variable, or a default; raises RegistryError for other text."""
    text = os.environ.get(variable)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise RegistryError(f"bad {variable}: {text[:80]!r}\n  expected a whole number")
    return int(text)


def ignore(event: object) -> None:
    """Does nothing with an event."""


class Progress:
    """Progress of an `upload` or `download`; several threads add to it.

    `observer` is called after every change, from any thread, one at a time.
    """

    def __init__(self, what: str, total_bytes: int, observer: Observer) -> None:
        self.what = what
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._observer = observer
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Takes a number of bytes more, or fewer."""
        with self._lock:
            self.done_bytes += size_bytes
            self._observer(self)


Observer = Callable[[Progress], None]
"""Looks at how far a transfer is."""


def with_retries(action: Callable[[], T]) -> T:
    """Returns what `action` returns, and repeats it while it raises RegistryUnavailableError.

    Raises:
        Exception: `check_time` raises it, once the time of all requests together is over.
    """
    for failures in range(1, ATTEMPTS + 1):
        check_time()
        try:
            return action()
        except RegistryUnavailableError as error:
            check_time()  # which says more than that nothing came in the time that was left
            if failures == ATTEMPTS:
                raise
            wait_to_retry(error, failures)
    raise AssertionError("unreachable")


def wait_to_retry(error: RegistryUnavailableError, failures: int) -> None:
    """Waits after so many failures in a row.

    Pauses double, with jitter, so that a thousand jobs that were refused at once do not come back at once. If
    the registry says how long to wait, that counts, up to `MAX_PAUSE_S`. Raises what `check_time` does.
    """
    check_time()
    wait_s = FIRST_PAUSE_S * 2 ** (failures - 1) * random.uniform(0.5, 1.5)
    wait_s = min(max(wait_s, error.retry_after_s), MAX_PAUSE_S)
    log.info("trying again in %.1f s: %s", wait_s, error.message)
    time.sleep(min(wait_s, remaining_s()))


OpenAt = Callable[[int], AbstractContextManager[Download]]
"""Opens a file at an offset in bytes, or at its beginning."""


class _PartialFile:
    """The beginning of a file, on disk, with its running digest."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size_bytes = file.tell()
        for block in read_blocks(path) if self.size_bytes else ():
            self._hash.update(block)

    def append(self, block: Block) -> None:
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


def download(open_at: OpenAt, path: Path, expected: FileEntry, report: Report = ignore) -> None:
    """Copies a file to `path`; what is there already, and what came before a cut, is not fetched again.

    Args:
        open_at: Opens the file.
        path: The file to be, or the beginning of it.
        expected: Size and digest of the whole.
        report: Takes the number of bytes that came or were there already; a negative one for lost bytes.

    Raises:
        RegistryUnavailableError: The source did not answer, or broke off, `ATTEMPTS` times in a row without a
            block.
        RegistryError: The file is not there.
        IntegrityError: It has other bytes than `expected`.
        OSError: `path` cannot be written.
        Exception: `check_time` raises it, once the time of the caller is over.
    """
    failures = reported = 0
    with path.open("ab") as file:
        partial = _PartialFile(path, file)
        if partial.size_bytes > expected.size_bytes:
            partial.restart()
        # A file that is whole is not asked for: many servers refuse a range that begins at the end.
        while not 0 < expected.size_bytes == partial.size_bytes:
            before_bytes = partial.size_bytes
            try:
                with open_at(before_bytes) as opened:
                    for _ in _receive(opened, partial, expected):
                        check_time()
                        report(partial.size_bytes - reported)
                        reported = partial.size_bytes
                break
            except RegistryUnavailableError as error:
                check_time()
                failures = 1 if partial.size_bytes - before_bytes >= BLOCK_BYTES else failures + 1
                if failures >= ATTEMPTS:
                    raise
                wait_to_retry(error, failures)
    check_copied(expected, partial.size_bytes, partial.digest)
    report(partial.size_bytes - reported)


def _receive(opened: Download, partial: _PartialFile, expected: FileEntry) -> Iterator[None]:
    """Appends block after block, and yields after each; raises IntegrityError for more than expected."""
    if opened.start != partial.size_bytes:
        log.debug("starting again: the download cannot be resumed")
        partial.restart()
    yield
    for block in opened.blocks:
        partial.append(block)
        if partial.size_bytes > expected.size_bytes:
            raise IntegrityError(
                f"too many bytes for {expected.path}\n  expected {expected.size_bytes} bytes, got more"
            )
        yield
