"""Files on web servers, in one request as long as nothing breaks.

Python's own client rather than fsspec's: it sends a file as one stream, leaves redirects the credentials they
came for, and can ask a server for the rest of a file on the condition that it is still the same (RFC 9110,
sections 13.1.5 and 14).
"""

from __future__ import annotations

import base64
import functools
import http.client
import netrc
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from pipeline.errors import SourceError
from pipeline.spec.redaction import redact_url
from pipeline.stages.fetch.transfer import CutError, Guarded, Opened, first_line

TIMEOUT_S = 60.0
"""Longest silence of a server before the connection counts as cut."""

_PASSING_STATUS = frozenset({408, 425, 429})


@dataclass(frozen=True)
class WebFile:
    """A file on a web server; user and password, if it needs them, are in `~/.netrc`."""

    url: str

    @property
    def name(self) -> str:
        """The URL without credentials."""
        return redact_url(self.url)

    @contextmanager
    def open(self, offset: int, version: str | None) -> Iterator[Opened]:
        """Asks for the rest from `offset` if the file is still the same version, else for the whole.

        Raises:
            SourceError: The server says that the file is not to be had.
            CutError: The server cannot be reached, is overloaded, or the connection broke.
        """
        with self._connect(self._request(offset, version), resumes=offset > 0) as response:
            yield self._describe(response)

    def _connect(self, request: urllib.request.Request, *, resumes: bool) -> http.client.HTTPResponse:
        try:
            response: http.client.HTTPResponse = _opener().open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refused(error.code, resumes=resumes) from error
        except (http.client.InvalidURL, UnicodeError) as error:
            raise self._no_url() from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise SourceError(f"cannot trust the server of {self.name}\n  {error.reason}") from error
            raise CutError(f"no connection: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise CutError(f"no answer: {first_line(error)}") from error
        return response

    def _request(self, offset: int, version: str | None) -> urllib.request.Request:
        parts = self._split()
        host = parts.netloc.rpartition("@")[2]
        path = quote(parts.path, safe="/%:@!$&'()*+,;=~")
        query = quote(parts.query, safe="/?%:@!$&'()*+,;=~")
        request = urllib.request.Request(urlunsplit((parts.scheme, host, path, query, "")))
        request.add_header("User-Agent", "ortprep")
        # A compressed body has another length than the file, and no offset of it means anything.
        request.add_header("Accept-Encoding", "identity")
        authorization = _authorization(parts)
        if authorization is not None:
            # Not sent on to where the server redirects to, which may be another's.
            request.add_unredirected_header("Authorization", authorization)
        if offset and version is not None:
            request.add_header("Range", f"bytes={offset}-")
            request.add_header("If-Range", version)
        return request

    def _split(self) -> SplitResult:
        try:
            parts = urlsplit(self.url)
            valid = parts.hostname and (parts.port is None or parts.port)
        except ValueError:
            valid = None
        if not valid:
            raise self._no_url()
        return parts

    def _no_url(self) -> SourceError:
        return SourceError(f"not a URL: {self.name}\n  expected http(s)://host[:port]/path")

    def _refused(self, status: int, *, resumes: bool) -> SourceError | CutError:
        answer = f"HTTP {status} {http.client.responses.get(status, '')}".strip()
        if status >= 500 or status in _PASSING_STATUS or (status == 416 and resumes):
            return CutError(answer, start_again=status == 416)
        hints = {
            401: "put the host's user and password into ~/.netrc",
            403: "put the host's user and password into ~/.netrc, or ask for a fresh signed URL",
            404: "check the URL in a browser",
        }
        return SourceError(
            f"cannot fetch: {self.name}\n  expected HTTP 200, got {answer}", hint=hints.get(status)
        )

    def _describe(self, response: http.client.HTTPResponse) -> Opened:
        headers = response.headers
        if headers.get("Content-Encoding", "identity") != "identity":
            raise SourceError(f"cannot fetch: {self.name}\n  expected the file itself, got it compressed")
        length = headers.get("Content-Length")
        size_bytes = int(length) if length is not None and length.isdecimal() else None
        # A weak ETag promises an equivalent file only, and equivalent halves do not make a whole.
        etag = headers.get("ETag", "")
        version = etag if etag.startswith('"') else headers.get("Last-Modified")
        start = 0
        if response.status == 206:
            found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
            if found is None:
                raise CutError("the server sent a part of the file without saying which")
            start = int(found[1])
            size_bytes = int(found[2]) if found[2] != "*" else None
        return Opened(
            Guarded(response, (OSError, http.client.HTTPException, ValueError)), start, size_bytes, version
        )


def _authorization(parts: SplitResult) -> str | None:
    user, password = parts.username, parts.password
    if user is None:
        entry = None
        with suppress(OSError, netrc.NetrcParseError):
            entry = netrc.netrc().authenticators(parts.hostname or "")
        if entry is None:
            return None
        user, password = entry[0], entry[2]
    pair = f"{unquote(user)}:{unquote(password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode('ascii')}"


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """Returns a client for http and https alone: no redirect leads to a local file or an FTP server."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener
