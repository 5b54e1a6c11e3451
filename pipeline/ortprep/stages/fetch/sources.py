"""Sources of the files of a model: this machine, a web server, an object store, or the Hub."""

from __future__ import annotations

import netrc
import os
import posixpath
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit, urlunsplit

from ortprep.bundle.file_memory import read_stamp
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import IntegrityError, RegistryError, RegistryUnavailableError, SourceError
from ortprep.spec.urls import redact_url
from ortprep.stages.fetch.inspection import find_beside
from ortprep.transport.fsspec_folder import FsspecFolder
from ortprep.transport.time_limit import limit_time
from ortprep.transport.transfer import MAX_BYTES, Download, download, read_blocks, read_limit

TIMEOUT_VARIABLE = "ORTPREP_FETCH_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 6 * 3600
"""Longest time for a whole file in seconds, unless the environment has another one."""

SILENCE_TIMEOUT_S = 60.0
"""Longest silence of a web server in seconds before the connection counts as cut."""

ATTEMPTS = 7

_LATER = "run the command again later, or download the file by hand and use source: {path: …}"


class Source(Protocol):
    """A place that a file comes from."""

    @property
    def name(self) -> str:
        """The file as it may be shown: without credentials."""
        ...

    def open(self, offset: int) -> AbstractContextManager[Download]:
        """Opens the file, at `offset` if the source can.

        Raises:
            RegistryUnavailableError: The source does not answer right now.
            RegistryError: There is no such file, or it may not be read.
        """
        ...

    def beside(self, location: str) -> Source:
        """Returns a file by its path relative to this one's folder, with `/`; it leads out of no folder."""
        ...


def fetch_file(
    source: Source,
    path: Path,
    *,
    sha256: str | None = None,
    max_bytes: int = MAX_BYTES,
    progress: Callable[[float], None] | None = None,
) -> FileEntry:
    """Copies a file of a source to a new file.

    Args:
        source: Source of the file.
        path: The new file.
        sha256: Digest that the caller compares; after a cut such a file goes on where it was.
        max_bytes: Size of the largest file, in bytes.
        progress: Takes the fraction that is there, after every block, where the source says how large it is.

    Returns:
        Size and digest of what was written, under the name of `path`.

    Raises:
        SourceError: It is not there, or could not be had in full.
        OSError: `path` cannot be written.
    """

    def show(done_bytes: int, size_bytes: int | None) -> None:
        if size_bytes and progress is not None:
            progress(min(done_bytes / size_bytes, 1.0))

    with limit_fetch(source.name):
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = download(
            source.open,
            path,
            name=source.name,
            sha256=sha256,
            max_bytes=max_bytes,
            attempts=ATTEMPTS,
            progress=show,
        )
    return FileEntry(path.name, entry.size_bytes, entry.sha256)


@contextmanager
def limit_fetch(name: str) -> Iterator[None]:
    """Gives a block the time of a whole file, and turns what a download raises into a `SourceError`."""
    with source_errors():
        timeout_s = read_limit(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)
        late = RegistryError(
            f"took too long: {name}\n  expected {timeout_s} s at most",
            hint=f"export {TIMEOUT_VARIABLE}=SECONDS, or download the file and use source: {{path: …}}",
        )
        with limit_time(timeout_s, late):
            yield


@contextmanager
def source_errors() -> Iterator[None]:
    """Turns what a download raises into a `SourceError`."""
    try:
        yield
    except (RegistryError, IntegrityError) as error:
        hint = error.hint or (_LATER if isinstance(error, RegistryUnavailableError) else None)
        raise SourceError(error.message, hint=hint) from error


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine; links are followed."""

    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @contextmanager
    def open(self, offset: int) -> Iterator[Download]:  # noqa: ARG002 - part of the protocol
        """Opens the file from its beginning, and refuses it if it changed meanwhile.

        Raises:
            SourceError: It cannot be read, or changed.
        """
        try:
            before = read_stamp(self.path)
            with self.path.open("rb"):
                pass
        except OSError as error:
            raise SourceError(f"cannot read {self.name}\n  {error.strerror}") from error
        yield Download(read_blocks(self.path), 0, before[2])
        if read_stamp(self.path) != before:
            raise SourceError(f"file changed while it was read: {self.name}", hint="run the command again")

    def beside(self, location: str) -> LocalFile:
        """Returns a file below this one's folder; raises SourceError for none, and for a link out of it."""
        return LocalFile(find_beside(self.path, location))


@dataclass(frozen=True)
class StoreObject:
    """A file on an object store: `s3://`, `gs://`, `az://`, …, as `spec.urls` allows."""

    url: str

    @property
    def name(self) -> str:
        """The URL without credentials."""
        return redact_url(self.url)

    @contextmanager
    def open(self, offset: int) -> Iterator[Download]:
        """Opens the file; raises as `Source.open`, and MissingExtraError without the store's package."""
        parent, _, path = self.url.rpartition("/")
        store = FsspecFolder(parent, called="source")
        before = store.read_version(path)
        with store.open(path, offset, name=self.name) as download:
            yield download
        if store.read_version(path) != before:
            raise RegistryUnavailableError(f"file changed while it was read: {self.name}")

    def beside(self, location: str) -> StoreObject:
        """Returns the object of that name in this one's folder, or below it."""
        return StoreObject(f"{self.url.rpartition('/')[0]}/{location}")


@dataclass(frozen=True)
class WebFile:
    """A file on a web server.

    Attributes:
        url: Its URL; user and password, if it needs them, are in `~/.netrc`.
        authorization: Header that replaces them; no other server gets it.
        shown: Name in messages; by default the URL without credentials.
    """

    url: str
    authorization: str | None = field(default=None, repr=False)
    shown: str | None = None

    @property
    def name(self) -> str:
        """The file as it is shown."""
        return self.shown or redact_url(self.url)

    def open(self, offset: int) -> AbstractContextManager[Download]:
        """Asks for the rest from `offset`.

        Raises:
            RegistryUnavailableError: The server cannot be reached, is overloaded, or the connection broke.
            RegistryError: The server says that the file is not to be had.
        """
        from ortprep.transport.http_answers import open_file  # builds that fetch nothing do without requests

        return open_file(self._ask, f"fetch: {self.name}", offset)

    def beside(self, location: str) -> WebFile:
        """Returns a file in this one's folder, or below it. The query stays: it may give access."""
        parts = urlsplit(self.url)
        path = posixpath.join(posixpath.dirname(parts.path), quote(location))
        return WebFile(urlunsplit((parts.scheme, parts.netloc, path, parts.query, "")))

    @contextmanager
    def _ask(self, headers: Mapping[str, str]) -> Iterator[Any]:
        """Yields the answer to one request; credentials go to the URL that was asked for, and to no other."""
        import requests

        from ortprep.transport import http_answers
        from ortprep.transport.http_session import make_session

        doing = f"fetch: {self.name}"
        common = {"User-Agent": "ortprep", **headers}
        with make_session() as session:
            # Trusts what the system trusts. Without `auth` it would look into `~/.netrc` for every host.
            paths = ssl.get_default_verify_paths()
            session.verify = paths.cafile or paths.capath or True
            session.auth = lambda request: request

            def ask(url: str) -> requests.Response:
                own = {"Authorization": self.authorization} if self.authorization and url == first else {}
                auth = find_login(url) if url == first and not own else None
                return session.get(url, headers=common | own, auth=auth, timeout=SILENCE_TIMEOUT_S)

            try:
                first = http_answers.check_http_url(requests.utils.requote_uri(self.url))
                response = http_answers.ask_in_time(
                    lambda: http_answers.follow_redirects(ask, first, check_redirect),
                    doing,
                    http_answers.ANSWER_TIMEOUT_S,
                )
            except ValueError as error:
                raise http_answers.connection_error(error, doing) from None
            with response:
                if response.status_code in (200, 206):
                    yield response
                    return
                if response.status_code != 416 or "Range" not in headers:
                    hint = "put the host's user and password into ~/.netrc, or ask for a fresh signed URL"
                    raise http_answers.status_error(response, doing, hint=hint)
        with self._ask({}) as response:  # the file is shorter now
            yield response


def find_login(url: str) -> tuple[str, str] | None:
    """Returns the user and password that `~/.netrc` has for an https URL's own host, None for none.

    Its `default` entry counts for no host: a spec's URL may name any.
    """
    parts, host = urlsplit(url), urlsplit(url).hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        hosts = netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser()).hosts
        if parts.scheme == "https" and host in hosts and host != "default":
            user, account, password = hosts[host]
            return user or account, password
    return None


def check_redirect(url: str, target: str) -> str:
    """Refuses redirects from https to what is not, and to a local file: they could send another model.

    Raises:
        RegistryError: The redirect is refused.
        ValueError: The target is no URL.
    """
    import requests

    from ortprep.transport.http_answers import check_http_url

    allowed = ("https://",) if url.startswith("https:") else ("https://", "http://")
    if not target.lower().startswith(allowed):
        raise RegistryError(
            f"cannot fetch: {redact_url(url)}\n"
            f"  expected {allowed[-1].removesuffix('://')}, got a redirect to {redact_url(target)}"
        )
    return check_http_url(requests.utils.requote_uri(target))


def source_of(url: str) -> Source:
    """Returns the source of a URL that is not on the Hub."""
    is_web = url.partition("://")[0].lower() in ("http", "https")
    return WebFile(url) if is_web else StoreObject(url)
