"""The HTTP session of oras, made safe: bounded in time, and silent about what is secret."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import oras.provider
import requests
from requests.adapters import HTTPAdapter

from pipeline.errors import RegistryError
from pipeline.registry.backends.oci.errors import OVERLOADED, unavailable

_MAX_TOKEN_BYTES = 1024 * 1024
_SEND_BLOCK_BYTES = 256 * 1024
_CONNECTIONS = 16


def open_session(host: str, *, secure: bool, timeout_s: tuple[float, float]) -> requests.Session:
    """Returns a session of oras for a registry.

    Args:
        host: Host and port.
        secure: Whether to use TLS.
        timeout_s: Longest wait for a connection, and for the next bytes.
    """
    session: requests.Session = oras.provider.Registry(hostname=host, insecure=not secure).session
    # Without it requests would replace our `Authorization` by what `~/.netrc` has for the host.
    session.auth = _leave_alone
    adapter = _BoundedAdapter(timeout_s)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    logging.getLogger("urllib3.connectionpool").addFilter(_hide_queries)
    return session


class _BoundedAdapter(HTTPAdapter):
    """Gives up on silent servers, and on endless answers to what oras asks for by itself: tokens."""

    def __init__(self, timeout_s: tuple[float, float]) -> None:
        self._timeout_s = timeout_s
        super().__init__(pool_connections=_CONNECTIONS, pool_maxsize=_CONNECTIONS)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options, blocksize=_SEND_BLOCK_BYTES)

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: float | tuple[float | None, float | None] | None = None,
        verify: bool | str = True,
        cert: str | tuple[str, str] | None = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        timeout = timeout or self._timeout_s
        given = dict(proxies or {})
        response = super().send(request, stream, timeout, verify, cert, given)
        if stream:
            return response
        if response.status_code in OVERLOADED:
            with response:
                raise unavailable(f"cannot get a token\n  got status {response.status_code}")
        response.raw = _Capped(response.raw, _MAX_TOKEN_BYTES)
        return response


class _Capped:
    """A body that ends in an error when it is too long."""

    def __init__(self, raw: Any, limit_bytes: int) -> None:
        self._raw = raw
        self._limit_bytes = limit_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def stream(self, size: int, decode_content: bool | None = None) -> Iterator[bytes]:
        left = self._limit_bytes
        for block in self._raw.stream(size, decode_content=decode_content):
            left -= len(block)
            if left < 0:
                self._raw.close()
                raise RegistryError("cannot get a token\n  expected a short answer, got an endless one")
            yield block


def _hide_queries(record: logging.LogRecord) -> bool:
    """Cuts queries off the paths in a record: those of object storage and of uploads are signed."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            one.partition("?")[0] + "?…" if isinstance(one, str) and "?" in one else one
            for one in record.args
        )
    return True


def _leave_alone(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request
