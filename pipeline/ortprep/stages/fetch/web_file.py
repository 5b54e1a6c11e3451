"""Files on web servers, in one request as long as nothing breaks.

A cut transfer goes on with a range request, on the condition that the file is still the same (RFC 9110,
sections 13.1.5 and 14).
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import requests
import urllib3

from ortprep.errors import SourceError
from ortprep.registry.backends.rest import (
    UNENCODED,
    UNREAD,
    check_http_url,
    follow_redirects,
    is_encoded,
)
from ortprep.spec.redaction import hide_queries_in_logs, redact_url
from ortprep.stages.fetch.transfer import Download, TransferError, call_in_time, first_line, guard_reads

TIMEOUT_S = 60.0
"""Longest silence of a server before the connection counts as cut."""

_MAX_DIGITS = 20
"""Longest number that a server can say a size with: Python converts none of thousands of digits."""

_RETRIED_STATUS = frozenset({408, 425, 429})


def check_redirect(url: str, target: str) -> str:
    """Refuses redirects from https to what is not, and to a local file: they could send another model.

    Raises:
        SourceError: The redirect is refused.
        ValueError: The target is no URL.
    """
    allowed = ("https://",) if url.startswith("https:") else ("https://", "http://")
    if not target.lower().startswith(allowed):
        raise SourceError(
            f"cannot fetch: {redact_url(url)}\n"
            f"  expected {allowed[-1].removesuffix('://')}, got a redirect to {redact_url(target)}"
        )
    return check_http_url(requests.utils.requote_uri(target))


@dataclass(frozen=True)
class WebFile:
    """A file on a web server; user and password, if it needs them, are in `~/.netrc`."""

    url: str

    @property
    def name(self) -> str:
        """The URL without credentials."""
        return redact_url(self.url)

    @contextmanager
    def open(self, offset: int, version: str | None) -> Iterator[Download]:
        """Asks for the rest from `offset` if the file is still the same version, else for the whole.

        Raises:
            SourceError: The server says that the file is not to be had.
            TransferError: The server cannot be reached, is overloaded, or the connection broke.
        """
        headers = {"User-Agent": "ortprep", **UNENCODED}
        if offset and version is not None:
            headers |= {"Range": f"bytes={offset}-", "If-Range": version}
        with requests.Session() as session, self._get(session, headers) as response:
            if response.status_code not in (200, 206):
                raise self._refused(response, resumes=offset > 0)
            yield self._describe(response)

    def _get(self, session: requests.Session, headers: dict[str, str]) -> requests.Response:
        """Sends credentials to the URL that was asked for only, and trusts what the system trusts."""
        hide_queries_in_logs()
        paths = ssl.get_default_verify_paths()
        session.verify = paths.cafile or paths.capath or True
        # Without it requests would look into `~/.netrc` for each host that it is sent to.
        session.auth = lambda request: request

        def ask(url: str) -> requests.Response:
            auth = requests.utils.get_netrc_auth(url) if url == first else None
            return session.get(url, headers=headers, auth=auth, timeout=TIMEOUT_S, **UNREAD)

        try:
            first = check_http_url(requests.utils.requote_uri(self.url))
            return call_in_time(lambda: follow_redirects(ask, first, check_redirect))
        except requests.TooManyRedirects:
            raise SourceError(
                f"cannot fetch: {self.name}\n  expected HTTP 200, got too many redirects"
            ) from None
        except ValueError:
            raise SourceError(
                f"not a URL: {self.name}, or what it redirects to\n  expected http(s)://host[:port]/path"
            ) from None
        except requests.RequestException as error:
            # The text of the error itself has the URL in it, so it is dropped.
            reason = first_line(getattr(error.args[0], "reason", error.args[0]) if error.args else error)
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                raise SourceError(f"cannot trust the server of {self.name}\n  {reason}") from None
            raise TransferError(f"no connection: {reason}") from None

    def _refused(self, response: requests.Response, *, resumes: bool) -> SourceError | TransferError:
        status = response.status_code
        answer = f"HTTP {status} {response.reason or ''}".strip()
        if status >= 500 or status in _RETRIED_STATUS or (status == 416 and resumes):
            return TransferError(answer, start_again=status == 416)
        hints = {
            401: "put the host's user and password into ~/.netrc",
            403: "put the host's user and password into ~/.netrc, or ask for a fresh signed URL",
            404: "check the URL in a browser",
        }
        return SourceError(
            f"cannot fetch: {self.name}\n  expected HTTP 200, got {answer}", hint=hints.get(status)
        )

    def _describe(self, response: requests.Response) -> Download:
        headers = response.headers
        if is_encoded(response):
            raise SourceError(
                f"cannot fetch: {self.name}\n  expected the file itself, got a compressed answer"
            )
        length = headers.get("Content-Length", "")
        if len(length) > _MAX_DIGITS:
            raise SourceError(
                f"cannot fetch: {self.name}\n  expected a length, got one of {len(length)} digits"
            )
        size_bytes = int(length) if length.isdecimal() else None
        # A weak ETag promises an equivalent file only, and equivalent halves do not make a whole.
        etag = headers.get("ETag", "")
        version = etag if etag.startswith('"') else headers.get("Last-Modified")
        start = 0
        if response.status_code == 206:
            match = re.fullmatch(r"bytes (\d{1,20})-\d+/(\d{1,20}|\*)", headers.get("Content-Range", ""))
            if match is None:
                raise TransferError("the server sent part of the file without saying which part")
            start = int(match[1])
            size_bytes = int(match[2]) if match[2] != "*" else None
        # What arrived before a cut is kept; `fetch_file` compares the length itself.
        response.raw.enforce_content_length = False
        read = partial(response.raw.read, decode_content=False)
        failures = (OSError, urllib3.exceptions.HTTPError, ValueError)
        return Download(guard_reads(read, failures, abort=response.raw.shutdown), start, size_bytes, version)
