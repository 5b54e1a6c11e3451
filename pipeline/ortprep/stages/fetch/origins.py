"""Where files come from: this machine, a web server, or an object store."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ortprep.bundle.file_memory import read_stamp
from ortprep.errors import SourceError
from ortprep.spec.redaction import redact_url
from ortprep.stages.fetch.fsspec_file import FsspecFile
from ortprep.stages.fetch.transfer import Download, Origin


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine.

    Attributes:
        path: The file; links are followed.
        name: As it is shown.
    """

    path: Path
    name: str

    @contextmanager
    def open(self, offset: int, version: str | None) -> Iterator[Download]:
        """Opens the file from its beginning, and refuses it if it changed meanwhile.

        Raises:
            SourceError: It cannot be read, or changed.
        """
        del offset, version
        try:
            before = read_stamp(self.path)
            file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise SourceError(f"cannot read {self.name}\n  {error.strerror}") from error
        with file:
            yield Download(file.read, 0, before[2], None)
        if read_stamp(self.path) != before:
            raise SourceError(f"file changed while it was read: {self.name}", hint="run the command again")


def origin_of(url: str) -> Origin:
    """Returns the origin of a URL."""
    if url.partition("://")[0].lower() not in ("http", "https"):
        return FsspecFile(url)
    # Not imported by builds that fetch nothing.
    from ortprep.stages.fetch.web_file import WebFile

    return WebFile(url)


def is_file_url(url: str) -> bool:
    """Returns whether a URL names a file of this machine."""
    return url.lower().startswith("file://")


def path_of_file_url(url: str) -> Path:
    """Returns the path a `file://` URL names.

    Raises:
        SourceError: It names another machine.
    """
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise SourceError(f"not a file on this machine: {redact_url(url)}\n  expected file:///absolute/path")
    return Path(unquote(parts.path))


def beside(url: str, location: str) -> str:
    """Returns the URL of a file that lies beside another, or below its folder.

    Args:
        url: URL of the model; a query is kept, since it may carry what access needs.
        location: Relative POSIX path.
    """
    if url.partition("://")[0].lower() in ("http", "https"):
        parts = urlsplit(url)
        path = posixpath.join(posixpath.dirname(parts.path), quote(location))
        return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
    return f"{url.rpartition('/')[0]}/{location}"
