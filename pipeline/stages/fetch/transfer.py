"""Copying a file of any size to this machine: in blocks, hashed on the way, continued after a cut.

The bookkeeping knows nothing of protocols: an `Origin` opens its file at an offset, and what it says about
the file then (size and version) decides whether a cut transfer may go on or has to start again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from pipeline.bundle.digest import PREFIX, DigestCache
from pipeline.errors import SourceError

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20


class CutError(Exception):
    """The transfer was interrupted in a way that trying again may mend; never leaves `fetch_file`.

    Args:
        message: What happened.
        start_again: Whether what was received so far is of no use.
    """

    def __init__(self, message: str, *, start_again: bool = False) -> None:
        super().__init__(message)
        self.start_again = start_again


class Stream(Protocol):
    """What can be read in blocks."""

    def read(self, size: int, /) -> bytes:
        """Returns up to `size` bytes, nothing at the end.

        Raises:
            CutError: The origin failed.
        """
        ...


class Guarded:
    """A stream whose own failures read as cuts; those of the disk that is written to stay what they are.

    Args:
        stream: What is read.
        failures: The exceptions that mean that it broke.
    """

    def __init__(self, stream: Stream, failures: tuple[type[Exception], ...]) -> None:
        self._stream = stream
        self._failures = failures

    def read(self, size: int, /) -> bytes:
        """Returns up to `size` bytes, nothing at the end.

        Raises:
            CutError: The stream broke.
        """
        try:
            return self._stream.read(size)
        except self._failures as error:
            raise CutError(f"the connection broke: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Returns what an exception says, in one line."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]


@dataclass(frozen=True)
class Opened:
    """A file as it stands open at its origin.

    Attributes:
        stream: Gives the file's bytes from `start` on.
        start: Offset of the first byte that `stream` gives.
        size_bytes: Size of the whole file, None if the origin does not say.
        version: Changes when the file does (an ETag, say), None if the origin gives no such thing.
    """

    stream: Stream
    start: int
    size_bytes: int | None
    version: str | None


class Origin(Protocol):
    """Where a file comes from."""

    @property
    def name(self) -> str:
        """The file as it may be shown: without credentials."""
        ...

    def open(self, offset: int, version: str | None) -> AbstractContextManager[Opened]:
        """Opens the file, at `offset` if the origin can and the file still has that version.

        Raises:
            SourceError: There is no such file, or it may not be read; trying again is useless.
            CutError: The origin does not answer right now.
        """
        ...


@dataclass(frozen=True)
class RetryPolicy:
    """How often a transfer that makes no headway is tried.

    Attributes:
        attempts: Tries in a row of which none brings a block.
        first_wait_s: Pause before the second; it doubles each time.
        longest_wait_s: The longest pause.
    """

    attempts: int = 6
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0

    def wait_s(self, failures: int) -> float:
        """Returns the pause after that many failures in a row."""
        return float(min(self.first_wait_s * 2 ** (failures - 1), self.longest_wait_s))


@dataclass(frozen=True)
class Received:
    """A file that was copied: what was written, not what was announced."""

    size_bytes: int
    sha256: str


class _Partial:
    """The beginning of a file, on disk, with its running digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    def append(self, block: bytes) -> None:
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


def fetch_file(
    origin: Origin,
    destination: Path,
    *,
    retry: RetryPolicy | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Received:
    """Copies a file, going on where it was cut as long as the origin still has the same file.

    Args:
        origin: Where it comes from.
        destination: The new file; its folder is made.
        retry: How patient to be.
        sleep: Waits that many seconds.

    Raises:
        SourceError: It is not there, or could not be had in full.
        OSError: `destination` cannot be written.
    """
    retry = retry or RetryPolicy()
    destination.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    version: str | None = None
    with destination.open("wb") as file:
        partial = _Partial(file)
        while True:
            before = partial.size_bytes
            try:
                with origin.open(partial.size_bytes, version) as opened:
                    version = opened.version
                    _receive(opened, partial)
                break
            except CutError as cut:
                version = None if cut.start_again else version
                failures = 1 if partial.size_bytes - before >= BLOCK_BYTES else failures + 1
                _give_up_or_wait(origin, cut, failures=failures, partial=partial, retry=retry, sleep=sleep)
    DigestCache().record(destination, partial.digest)
    return Received(partial.size_bytes, partial.digest)


def _receive(opened: Opened, partial: _Partial) -> None:
    if opened.start != partial.size_bytes:
        log.debug("starting again: the file changed, or its server cannot continue one")
        partial.restart()
    while block := opened.stream.read(BLOCK_BYTES):
        partial.append(block)
    if opened.size_bytes is not None and partial.size_bytes != opened.size_bytes:
        raise CutError(f"expected {opened.size_bytes} bytes, got {partial.size_bytes}")


def _give_up_or_wait(
    origin: Origin,
    cut: CutError,
    *,
    failures: int,
    partial: _Partial,
    retry: RetryPolicy,
    sleep: Callable[[float], None],
) -> None:
    if failures >= retry.attempts:
        raise SourceError(
            f"cannot fetch in full: {origin.name}\n"
            f"  {cut}; gave up after {failures} tries in a row, with {partial.size_bytes} bytes received",
            hint="run the command again later, or download the file by hand and use source: {path: …}",
        ) from cut
    log.info("%s: %s; trying again", origin.name, cut)
    sleep(retry.wait_s(failures))
