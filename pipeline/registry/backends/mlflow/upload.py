"""Bytes on their way to MLflow: checked before the last of them goes out, and counted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from pipeline.bundle.digest import PREFIX, digest_bytes
from pipeline.bundle.loader_config import FileEntry
from pipeline.bundle.regular_file import open_regular
from pipeline.errors import IntegrityError
from pipeline.registry.backend import BLOCK_BYTES, Report


class Upload:
    """A file, or bytes, to upload; may be sent several times.

    Args:
        entry: What it has to be.
        source: The file, or the bytes themselves.
        report: Told about progress.

    Attributes:
        problem: What went wrong with the source while it was read, None if nothing did. HTTP clients wrap
            what a body raises.
    """

    def __init__(self, entry: FileEntry, source: Path | bytes, report: Report) -> None:
        self._entry = entry
        self._source = source
        self._report = report
        self._reported_bytes = 0
        self.problem: IntegrityError | OSError | None = None

    def __len__(self) -> int:
        return self._entry.size_bytes

    def body(self) -> Upload | bytes:
        """Returns what an HTTP client sends with its length in front.

        Raises:
            IntegrityError: It is to be empty and is not.
        """
        if self._entry.size_bytes:
            return self
        self.check()
        return b""

    def __iter__(self) -> Iterator[bytes]:
        """Yields blocks; the last one only when all bytes are known to be the right ones."""
        try:
            yield from self._checked_blocks()
        except (IntegrityError, OSError) as error:
            self.problem = error
            raise

    def _checked_blocks(self) -> Iterator[bytes]:
        hasher, held, count = hashlib.sha256(), b"", 0
        for block in self._read():
            hasher.update(block)
            count += len(block)
            if count > self._entry.size_bytes:
                break
            if held:
                yield held
                self._count(len(held))
            held = block
        got = PREFIX + hasher.hexdigest()
        if count != self._entry.size_bytes or got != self._entry.sha256:
            raise IntegrityError(
                f"file changed before its upload: {self._entry.path}\n"
                f"  expected {self._entry.size_bytes} bytes of {self._entry.sha256}, got others"
            )
        yield held
        self._count(len(held))

    def _read(self) -> Iterator[bytes]:
        if isinstance(self._source, bytes):
            yield self._source
            return
        with open_regular(self._source) as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def _count(self, count: int) -> None:
        self._reported_bytes += count
        self._report(count)

    def take_back(self) -> None:
        """Takes back what was reported, because it has to go again.

        Raises:
            IntegrityError: It was no failure of the network: the source has other bytes.
            OSError: Likewise: the source cannot be read.
        """
        if self._reported_bytes:
            self._count(-self._reported_bytes)
        if self.problem is not None:
            raise self.problem

    def check(self) -> None:
        """Reads everything once without sending it.

        Raises:
            IntegrityError: The source has other bytes.
            OSError: It cannot be read.
        """
        quiet = Upload(self._entry, self._source, lambda _: None)
        for _ in quiet._checked_blocks():
            pass

    def link(self, path: Path) -> None:
        """Makes the source readable at `path`."""
        if isinstance(self._source, bytes):
            path.write_bytes(self._source)
        else:
            path.symlink_to(self._source.absolute())

    def report_rest(self) -> None:
        """Reports everything that was not reported yet."""
        self._count(self._entry.size_bytes - self._reported_bytes)


def upload_bytes(path: str, data: bytes) -> Upload:
    """Returns an upload of bytes that nobody watches."""
    return Upload(FileEntry(path, len(data), digest_bytes(data)), data, lambda _: None)
