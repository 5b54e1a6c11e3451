"""The client of a registry's API: bounded in time, with credentials for the server's own origin alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import requests
from urllib3.util import parse_url

from ortprep.errors import AccessDeniedError, RegistryError
from ortprep.spec.urls import redact_url
from ortprep.transport import http_answers
from ortprep.transport.http_answers import (
    MAX_ERROR_BYTES,
    MAX_REDIRECTS,
    check_http_url,
    connection_error,
    read_body,
    read_refusal,
    status_error,
)
from ortprep.transport.http_session import make_session
from ortprep.transport.transfer import BLOCK_BYTES

ANY_STATUS = range(100, 600)
"""Statuses for a caller that tells them apart itself."""

OCTETS = {"Content-Type": "application/octet-stream"}
_PORTS = {"http": 80, "https": 443}


class HttpClient(ABC):
    """A client of one server; its subclasses have the credentials.

    Args:
        base: URL of its API, which relative locations are relative to.
        timeout_s: Timeouts of a connection, and of the next bytes of an answer, in seconds.
        login_hint: Hint for errors: a way to give other credentials.
    """

    def __init__(self, base: str, *, timeout_s: tuple[float, float], login_hint: str) -> None:
        self.base = base
        self._timeout_s = timeout_s
        self._login_hint = login_hint
        self._session = make_session()
        # A callable: requests would otherwise send what `~/.netrc` has for a host.
        self._session.auth = self._authorize_own

    @abstractmethod
    def authorize(self, request: requests.PreparedRequest) -> None:
        """Adds credentials to a request; it is called for requests to the server itself only."""

    @staticmethod
    @abstractmethod
    def read_reason(refusal: Mapping[str, Any]) -> str:
        """Returns, of the JSON object of a refusal, what may be shown."""

    def _authorize_own(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.is_own(str(request.url)):
            self.authorize(request)
            login = str(request.headers.get("Authorization", "")).strip()
            if not login.isascii() or not login.isprintable():  # else the HTTP library would quote it
                raise AccessDeniedError(
                    f"bad login for {redact_url(self.base)}\n"
                    "  expected printable ASCII characters, got others",
                    hint=self._login_hint,
                )
            if login:
                request.headers["Authorization"] = login
        return request

    def close(self) -> None:
        """Closes all connections."""
        self._session.close()

    def ask(
        self, method: str, url: str, doing: str, *, limit_bytes: int = MAX_ERROR_BYTES, **options: Any
    ) -> tuple[requests.Response, bytes]:
        """Asks once, as `open` does; returns the answer and its body."""
        with self.open(method, url, doing, **options) as response:
            return response, read_body(response, doing, limit_bytes)

    def open(
        self,
        method: str,
        url: str,
        doing: str,
        *,
        expected: Collection[int] = (200,),
        follows: bool = False,
        limit_s: float | None = None,
        **options: Any,
    ) -> requests.Response:
        """Asks once, and returns the answer with its body unread; the caller closes it.

        Args:
            method: HTTP method.
            url: Relative to the base, or a whole URL that the server gave.
            doing: Purpose and place for messages, as in "list the tags: HOST/REPOSITORY".
            expected: The statuses that are no error.
            follows: Whether to follow redirects, with credentials for the base's own origin only; else one is
                an unexpected answer.
            limit_s: Longest time until the answer begins; None for that of a request without a large body.
            options: Further options of `requests`: `headers`, `data`, ….

        Raises:
            AccessDeniedError: There are no credentials, or they are not accepted.
            RegistryError: There is no answer, or an unexpected one; by kind.
        """
        settings = {"timeout": self._timeout_s, **options}
        url = urljoin(self.base, url)
        for _ in range(MAX_REDIRECTS + 1):
            request = partial(self._session.request, method, url, **settings)
            response = http_answers.ask_in_time(request, doing, limit_s or http_answers.ANSWER_TIMEOUT_S)
            location = response.raw.headers.get("Location")
            if not follows or response.status_code not in requests.models.REDIRECT_STATI or not location:
                break
            with response:
                read_refusal(response, doing)  # a little of it: `requests` would read and unpack all
            try:
                url = self.resolve(urljoin(url, location.encode("latin-1").decode()), doing)
            except ValueError as error:
                raise connection_error(error, doing) from None
        else:
            raise RegistryError(f"cannot {doing}\n  expected an answer, got too many redirects")
        if response.status_code in expected:
            return response
        with response:
            raise self.refuse(response, read_refusal(response, doing), doing)

    def put_file(self, url: str, doing: str, source: Path, *, expected: Collection[int]) -> requests.Response:
        """Uploads a file as the body of one request, and returns the answer, which is read; as `open`."""
        with source.open("rb", buffering=0) as file:
            size_bytes = source.stat().st_size
            blocks = size_bytes / BLOCK_BYTES
            limit_s = http_answers.ANSWER_TIMEOUT_S + http_answers.BLOCK_TIMEOUT_S * blocks
            data = file if size_bytes else b""  # of an empty file requests would not send the length
            options: dict[str, Any] = {"headers": OCTETS, "data": data, "limit_s": limit_s}
            return self.ask("PUT", url, doing, expected=expected, **options)[0]

    def refuse(self, response: requests.Response, refusal: Mapping[str, Any], doing: str) -> RegistryError:
        """Returns the error that an unexpected answer and its JSON object stand for."""
        return status_error(response, doing, said=self.read_reason(refusal), hint=self._login_hint)

    def resolve(self, location: str | None, doing: str) -> str:
        """Returns the URL in a header; raises RegistryError without one, or if it leaves https for http.

        It is what `check_http_url` returns.
        """
        if not location:
            raise RegistryError(f"cannot {doing}\n  expected a location, got none")
        try:
            url = check_http_url(urljoin(self.base, location))
        except ValueError as error:
            raise connection_error(error, doing) from None
        if url.startswith("http:") and self.is_own("https" + url[4:]):
            # Servers behind a proxy that ends TLS do not know that they are asked over it.
            return "https" + url[4:]
        if self.base.startswith("https:") and not url.startswith("https:"):
            raise RegistryError(f"cannot {doing}\n  expected an https URL, got another")
        return url

    def is_own(self, url: str) -> bool:
        """Says whether a URL leads to the server itself: its scheme, host and port."""
        return origin_of(url) == origin_of(self.base)


def origin_of(url: str) -> tuple[str | None, str | None, int | None]:
    """Returns scheme, host and port of a URL; raises as `check_http_url`."""
    parts = parse_url(check_http_url(url))
    return parts.scheme, parts.host, parts.port or _PORTS.get(parts.scheme or "")
