"""Files on object stores, through fsspec's plug-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from ortprep.errors import MissingExtraError, SourceError
from ortprep.spec.redaction import redact_url
from ortprep.stages.fetch.transfer import Download, TransferError, first_line, guard_reads

_VERSION_KEYS = (
    "ETag",
    "etag",
    "md5",
    "checksum",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
"""What filesystems call that which changes when a file does."""

_FAILURES = (OSError, ValueError, RuntimeError, EOFError)
_FINAL = (
    (FileNotFoundError, "no such file"),
    (PermissionError, "no permission"),
    (IsADirectoryError, "a folder"),
)


@dataclass(frozen=True)
class FsspecFile:
    """A file on a store that fsspec has a plug-in for: `s3://`, `gs://`, `az://`, ….

    Attributes:
        url: What `spec.url_schemes.check_url` accepts.
    """

    url: str

    @property
    def name(self) -> str:
        """The URL without credentials."""
        return redact_url(self.url)

    @contextmanager
    def open(self, offset: int, version: str | None) -> Iterator[Download]:
        """Opens the file, at `offset` if size and version are what they were.

        Raises:
            SourceError: There is no such file, no such protocol, or no permission.
            MissingExtraError: The filesystem's package is not installed.
            TransferError: The filesystem failed in another way.
        """
        filesystem, path = self._resolve()
        file, (size_bytes, current) = self._open(filesystem, path)
        with file:
            start = offset if version is not None and current == version else 0
            if start:
                file.seek(start)
            yield Download(guard_reads(file.read, _FAILURES), start, size_bytes, current)
        if self._describe(filesystem, path)[1] != current:
            raise TransferError("the file changed while it was read", start_again=True)

    def _open(self, filesystem: Any, path: str) -> tuple[IO[bytes], tuple[int | None, str | None]]:
        described = self._describe(filesystem, path)
        try:
            return filesystem.open(path, "rb"), described
        except _FAILURES as error:
            raise self._failure(error) from error

    def _describe(self, filesystem: Any, path: str) -> tuple[int | None, str | None]:
        try:
            # Filesystems remember listings; what counts is how the file is now.
            filesystem.invalidate_cache()
            info = filesystem.info(path)
        except _FAILURES as error:
            raise self._failure(error) from error
        if info.get("type") == "directory":
            raise self._failure(IsADirectoryError())
        size = info.get("size")
        stamps = {key: str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None}
        return (size if isinstance(size, int) else None), (repr((size, stamps)) if stamps else None)

    def _failure(self, error: Exception) -> SourceError | TransferError:
        what = next((text for kind, text in _FINAL if isinstance(error, kind)), None)
        if what is None:
            return TransferError(f"no answer: {first_line(error)}")
        return SourceError(f"cannot fetch: {self.name}\n  expected a file, got {what}")

    def _resolve(self) -> tuple[Any, str]:
        import fsspec

        try:
            filesystem, path = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            protocol = self.url.partition("://")[0]
            raise MissingExtraError(
                f"no filesystem for {protocol}:// URLs is installed\n  {error}"
            ) from error
        except (ValueError, OSError) as error:
            raise SourceError(f"cannot open {self.name}\n  {first_line(error)}") from error
        return filesystem, path
