"""Requests to an OCI registry, bounded in time and size, with the session and credentials of oras."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests

from pipeline.bundle.codec import parse_json
from pipeline.errors import BundleError, RegistryError
from pipeline.registry.backend import BLOCK_BYTES
from pipeline.registry.backends.oci.auth import Authenticator
from pipeline.registry.backends.oci.errors import connection_error, status_error
from pipeline.registry.backends.oci.requests import MAX_ERROR_BYTES, Answer, Request
from pipeline.registry.backends.oci.session import open_session
from pipeline.registry.records import MAX_RECORDS
from pipeline.registry.retries import with_retries

_MAX_PAGE_BYTES = 32 * 1024 * 1024
_MAX_PAGES = 10_000
_MAX_NAMES = 4 * MAX_RECORDS
_MAX_REDIRECTS = 5
_PORTS = {"http": 80, "https": 443}


class OciClient:
    """A registry, as far as HTTP goes.

    Args:
        host: Host and port.
        secure: Whether to use TLS.
        connect_timeout_s: Longest wait for a connection, and for the registry to take a block.
        read_timeout_s: Longest wait for the next bytes.
    """

    def __init__(self, host: str, *, secure: bool, connect_timeout_s: float, read_timeout_s: float) -> None:
        self.host = host
        self._base = f"{'https' if secure else 'http'}://{host}/v2/"
        self._session = open_session(host, secure=secure, timeout_s=(connect_timeout_s, read_timeout_s))
        self._authenticator = Authenticator(host, secure=secure, session=self._session)

    def close(self) -> None:
        """Closes all connections."""
        self._session.close()

    def fetch(self, request: Request) -> Answer:
        """Asks, again while the registry is unavailable, and reads the whole answer.

        Raises:
            RegistryError: There is no answer, or not the expected one; by kind.
        """
        return with_retries(lambda: self.fetch_once(request))

    def fetch_once(self, request: Request) -> Answer:
        """As `fetch`, but asks once: for what cannot be asked again without looking first.

        Raises:
            RegistryError: There is no answer, or not the expected one; by kind.
        """
        response = self._open_once(request)
        try:
            body = self.read_body(response, request)
        finally:
            response.close()
        return Answer(response.status_code, response.headers, body)

    def open(self, request: Request) -> requests.Response:
        """Asks, and returns the answer with its body unread; the caller closes it.

        Raises:
            RegistryError: There is no answer, or not the expected one; by kind.
        """
        return with_retries(lambda: self._open_once(request))

    def resolve(self, location: str | None, request: Request) -> str:
        """Returns the URL that a header of an answer names.

        Raises:
            RegistryError: There is none.
        """
        place = self._place(request)
        if not location:
            raise RegistryError(f"cannot {request.doing}: {place}\n  expected a location, got none")
        url = urljoin(self._base, location)
        if url.startswith("http:") and self._is_own("https" + url[4:]):
            # Registries behind a proxy that ends TLS do not know that they are asked over it.
            return "https" + url[4:]
        return url

    def list_names(self, request: Request, field_name: str) -> Iterator[str]:
        """Yields the names in a list of the registry, page by page.

        Args:
            request: For the first page.
            field_name: The field that has them.

        Raises:
            RegistryError: There are too many, or the answer is no such list.
        """
        count = 0
        for _ in range(_MAX_PAGES):
            answer = self.fetch(replace(request, limit_bytes=_MAX_PAGE_BYTES))
            names = self._parse(answer.body, request).get(field_name) or []
            count += len(names) if isinstance(names, list) else 0
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise RegistryError(f"cannot {request.doing}: {self._place(request)}\n  got no list of names")
            if count > _MAX_NAMES:
                break
            yield from names
            following = _next_link(answer.headers.get("Link", ""))
            if not following:
                return
            url = self.resolve(following, request)
            if not self._is_own(url) or url == request.path:
                raise RegistryError(f"cannot {request.doing}: {self._place(request)}\n  got a bad next page")
            request = replace(request, path=url)
        raise RegistryError(
            f"cannot {request.doing}: {self._place(request)}\n"
            f"  expected at most {_MAX_NAMES} names on {_MAX_PAGES} pages, got more"
        )

    def read_body(self, response: requests.Response, request: Request) -> bytes:
        """Returns an answer's body.

        Raises:
            RegistryError: It is longer than the request allows, or breaks off.
        """
        parts, size = [], 0
        for block in self.blocks(response, request):
            parts.append(block)
            size += len(block)
            if size > request.limit_bytes:
                raise RegistryError(
                    f"cannot {request.doing}: {self._place(request)}\n"
                    f"  expected at most {request.limit_bytes} bytes, got more"
                )
        return b"".join(parts)

    def blocks(self, response: requests.Response, request: Request) -> Iterator[bytes]:
        """Yields the blocks of an answer's body.

        Raises:
            RegistryUnavailableError: It breaks off.
        """
        try:
            yield from response.iter_content(BLOCK_BYTES)
        except requests.RequestException as error:
            raise connection_error(error, self._place(request), request.doing) from None

    def _parse(self, body: bytes, request: Request) -> dict[str, Any]:
        try:
            return parse_json(body, name="the answer")
        except BundleError:
            raise RegistryError(
                f"cannot {request.doing}: {self._place(request)}\n  expected JSON, got another text"
            ) from None

    def _place(self, request: Request) -> str:
        return f"{self.host}/{request.repository}".rstrip("/")

    def _is_own(self, url: str) -> bool:
        return _origin(url) == _origin(self._base)

    def _open_once(self, request: Request) -> requests.Response:
        try:
            response = self._ask(request)
        except requests.RequestException as error:
            raise connection_error(error, self._place(request), request.doing) from None
        if response.status_code in request.expected:
            return response
        with response:
            body = _beginning(response)
        raise status_error(response.status_code, response.headers, body, self._place(request), request)

    def _ask(self, request: Request) -> requests.Response:
        method, repository = request.method, request.repository
        authorization = self._authenticator.known(repository, method)
        response = self._follow(request, authorization)
        challenge = response.headers.get("WWW-Authenticate", "")
        if response.status_code not in (401, 403) or not challenge or not self._is_own(response.url):
            return response
        if response.status_code == 403 and not authorization:
            return response
        with response:
            _beginning(response)
        authorization = self._authenticator.answer(challenge, repository, method, authorization)
        return self._follow(request, authorization)

    def _follow(self, request: Request, authorization: str) -> requests.Response:
        """Sends a request, with credentials to no other host than the registry's own."""
        prefix = self._base + (f"{request.repository}/" if request.repository else "")
        url = urljoin(prefix, request.path)
        for _ in range(_MAX_REDIRECTS):
            headers = {"Accept-Encoding": "identity", **request.headers}
            if authorization and self._is_own(url):
                headers["Authorization"] = authorization
            # In blocks: the time to send one piece is limited, and a chunk may take minutes.
            body = None if request.body is None else io.BytesIO(request.body)
            response = self._session.request(
                request.method, url, data=body, headers=headers, stream=True, allow_redirects=False
            )
            location = response.headers.get("Location")
            if not response.is_redirect or not location or request.method not in ("GET", "HEAD"):
                return response
            with response:
                _beginning(response)
            url = self.resolve(urljoin(url, location), request)
        raise RegistryError(f"cannot {request.doing}: {self._place(request)}\n  redirected again and again")


def _beginning(response: requests.Response) -> bytes:
    """Returns as much of an answer's body as its sender gives of its first bytes."""
    data = b""
    try:
        for block in response.iter_content(MAX_ERROR_BYTES):
            data += block
            if len(data) >= MAX_ERROR_BYTES:
                break
    except requests.RequestException:
        pass  # the status says enough
    return data


def _origin(url: str) -> tuple[str, str, int | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return "", "", None


def _next_link(header: str) -> str:
    links = requests.utils.parse_header_links(header)
    return next((link["url"] for link in links if link.get("rel") == "next"), "")
