"""Copying a file of any size to this machine: in blocks, hashed on the way, continued after a cut.

The bookkeeping knows nothing of protocols: an `Origin` opens its file at an offset, and what it says about
the file then (size and version) decides whether a cut transfer may go on or has to start again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from ortprep import time_limit
from ortprep.bundle.digest import PREFIX, DigestCache
from ortprep.errors import SourceError
from ortprep.time_limit import OutOfTimeError

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK_BYTES = 1 << 20

STALL_TIMEOUT_S = 300.0
"""Longest time for the next block of a file that comes over a network, and for a server's first answer."""

TIMEOUT_VARIABLE = "ORTPREP_FETCH_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 6 * 3600.0
"""Longest time for a whole file, unless the environment has another one."""


class TransferError(Exception):
    """The transfer was interrupted, and a retry may succeed; `fetch_file` and `retry_request` handle it.

    Args:
        message: What happened.
        start_again: Whether the bytes received so far are useless.
    """

    def __init__(self, message: str, *, start_again: bool = False) -> None:
        super().__init__(message)
        self.start_again = start_again


def guard_reads(
    read: Callable[[int], bytes],
    failures: tuple[type[Exception], ...],
    *,
    abort: Callable[[], object] = lambda: None,
) -> Callable[[int], bytes]:
    """Returns a reader that raises `TransferError` for these failures, and for a read that takes too long.

    Failures of the local disk stay. `abort` ends a read from another thread.
    """

    def guarded(size: int) -> bytes:
        try:
            return call_in_time(lambda: read(size), abort)
        except failures as error:
            raise TransferError(f"the connection broke: {first_line(error)}") from error

    return guarded


def call_in_time(call: Callable[[], T], abort: Callable[[], object] = lambda: None) -> T:
    """Returns what a call returns; raises `TransferError` if it takes longer than `STALL_TIMEOUT_S`."""
    try:
        return time_limit.call_in_time(call, STALL_TIMEOUT_S, abort)
    except OutOfTimeError as error:
        raise TransferError(str(error)) from None


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message."""
    return (str(error) or type(error).__name__).splitlines()[0][:300]


@dataclass(frozen=True)
class Download:
    """An open file of an origin.

    Attributes:
        read: Returns up to so many of the next bytes, nothing at the end.
        start: Offset of the first byte that `read` returns.
        size_bytes: Size of the whole file, None if the origin does not say.
        version: Changes when the file does (an ETag, say), None if the origin gives no such thing.
        sha256: Digest that the origin gives for the whole file, None if it gives none.
    """

    read: Callable[[int], bytes]
    start: int
    size_bytes: int | None
    version: str | None
    sha256: str | None = None


class Origin(Protocol):
    """Where a file comes from."""

    @property
    def name(self) -> str:
        """The file as it may be shown: without credentials."""
        ...

    def open(self, offset: int, version: str | None) -> AbstractContextManager[Download]:
        """Opens the file, at `offset` if the origin can and the file still has that version.

        Raises:
            SourceError: There is no such file, or it may not be read; trying again is useless.
            TransferError: The origin does not answer right now.
        """
        ...


@dataclass(frozen=True)
class RetryPolicy:
    """Limits of a transfer and of its retries.

    Attributes:
        attempts: Tries in a row that may bring no block.
        retry_delay_s: Pause before the second try, in seconds; it doubles each time.
        max_retry_delay_s: Longest pause, in seconds.
        max_bytes: Largest file, in bytes.
        timeout_s: Longest time for the whole file, in seconds; None for that of `$ORTPREP_FETCH_TIMEOUT_S`.
    """

    attempts: int = 6
    retry_delay_s: float = 0.5
    max_retry_delay_s: float = 30.0
    max_bytes: int = 2**40
    timeout_s: float | None = None


@dataclass(frozen=True)
class TransferResult:
    """A file that was copied: what was written, not what was announced."""

    size_bytes: int
    sha256: str


class _PartialFile:
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
    progress: Callable[[float], None] = lambda _: None,
) -> TransferResult:
    """Copies a file, going on where it was cut as long as the origin still has the same file.

    Args:
        origin: Where it comes from.
        destination: Where it goes.
        retry: Limits of the transfer.
        progress: Takes the fraction that is there, after every block, where the origin says how large it is.

    Raises:
        SourceError: It is not there, or could not be had in full.
        OSError: `destination` cannot be written.
    """
    retry = retry or RetryPolicy()
    destination.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    timeout_s = read_timeout_s() if retry.timeout_s is None else retry.timeout_s
    deadline_s = time.monotonic() + timeout_s
    version: str | None = None
    with destination.open("wb") as file:
        partial = _PartialFile(file)
        while True:
            before = partial.size_bytes
            try:
                with origin.open(partial.size_bytes, version) as download:
                    version = download.version
                    blocks = _receive(origin, download, partial, retry.max_bytes, deadline_s)
                    for _ in blocks:
                        if download.size_bytes:
                            progress(min(partial.size_bytes / download.size_bytes, 1.0))
                break
            except TransferError as error:
                version = None if error.start_again else version
                failures = 1 if partial.size_bytes - before >= BLOCK_BYTES else failures + 1
                _wait_to_retry(
                    f"cannot fetch in full: {origin.name}", error, failures, retry, partial.size_bytes
                )
    DigestCache().record(destination, partial.digest)
    return TransferResult(partial.size_bytes, partial.digest)


def read_timeout_s() -> float:
    """Returns the longest time for a whole file; raises SourceError if the environment has no number."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise SourceError(f"bad {TIMEOUT_VARIABLE}: {text[:80]!r}\n  expected a whole number of seconds")
    return float(text) if text else DEFAULT_TIMEOUT_S


def retry_request(request: Callable[[], T], name: str, retry: RetryPolicy) -> T:
    """Returns what a request returns, and repeats it where a retry may succeed.

    Args:
        request: Raises `TransferError` if it is worth repeating.
        name: The requested file as it may be shown.
        retry: Limits of the retries.

    Raises:
        SourceError: No attempt succeeded.
    """
    failures = 0
    while True:
        try:
            return request()
        except TransferError as error:
            failures += 1
            _wait_to_retry(f"cannot fetch: {name}", error, failures, retry, 0)


def _wait_to_retry(
    message: str, error: TransferError, failures: int, retry: RetryPolicy, received_bytes: int
) -> None:
    if failures >= retry.attempts:
        raise SourceError(
            f"{message}\n  {error}; gave up after {failures} tries in a row, with {received_bytes} bytes "
            "received",
            hint="run the command again later, or download the file by hand and use source: {path: …}",
        ) from error
    log.info("%s: %s; trying again", message, error)
    time.sleep(min(retry.retry_delay_s * 2 ** (failures - 1), retry.max_retry_delay_s))


def _receive(
    origin: Origin, download: Download, partial: _PartialFile, max_bytes: int, deadline_s: float
) -> Iterator[None]:
    """Appends block after block, and yields after each."""
    if download.start != partial.size_bytes:
        log.debug("starting again: the file changed, or its server cannot resume a download")
        partial.restart()
    while block := download.read(BLOCK_BYTES):
        partial.append(block)
        if partial.size_bytes > max_bytes:
            raise SourceError(f"cannot fetch: {origin.name}\n  expected at most {max_bytes} bytes, got more")
        if time.monotonic() > deadline_s:
            raise SourceError(
                f"took too long: {origin.name}\n  got {partial.size_bytes} bytes within the time limit",
                hint=f"export {TIMEOUT_VARIABLE}=SECONDS, or download the file and use source: {{path: …}}",
            )
        yield
    if download.size_bytes is not None and partial.size_bytes != download.size_bytes:
        raise TransferError(f"expected {download.size_bytes} bytes, got {partial.size_bytes}")
    if download.sha256 not in (None, partial.digest):
        raise TransferError(f"expected {download.sha256}, got {partial.digest}", start_again=True)
