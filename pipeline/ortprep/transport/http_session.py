"""HTTP sessions that keep nothing of a server's, log no secrets, and take no longer than `limit_time` leaves.

A socket's timeout begins again with every byte, so a server can keep a request waiting for ever: with `100
Continue` again and again, or with a byte of a header now and then. So each read and each write of a socket
gets no more time than is left of all.
"""

from __future__ import annotations

import io
import math
import socket
from http.client import HTTPResponse
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection

from ortprep.errors import RegistryError
from ortprep.spec.urls import hide_queries_in_logs
from ortprep.transport.time_limit import OutOfTimeError, call_in_time, remaining_s
from ortprep.transport.transfer import BLOCK_BYTES

_UNENCODED = {"Accept-Encoding": "identity"}
"""Headers of every request: a small compressed answer can become gigabytes, and has no offsets."""

_CONNECTIONS = 16
_MAX_HEADER_BYTES = 256 * 1024
"""Names and values of the headers of an answer; the standard library takes 6.5 MB."""

_MAX_CONNECT_S = 600.0
"""Longest time, in seconds, to look up a name and try all of its addresses, where nothing limits it."""


def make_session() -> requests.Session:
    """Returns a session that asks for unencoded answers and takes no cookies: a server may send gigabytes.

    It leaves bodies and redirects to its caller.
    """
    session, adapter = requests.Session(), _Adapter()
    session.stream = True
    session.hooks["response"].append(_hide_redirect)
    session.headers.update(_UNENCODED)
    adapter.init_poolmanager(_CONNECTIONS, _CONNECTIONS, blocksize=BLOCK_BYTES)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    hide_queries_in_logs("urllib3")
    return session


def _hide_redirect(response: requests.Response, **_: object) -> None:
    """Hides a redirect from `requests`, which would read and unpack its whole body."""
    if response.is_redirect:
        response.headers.pop("Location")


def _limit(sock: socket.socket, timeout_s: float | None) -> None:
    """Sets a socket's timeout, or what is left of the time; raises TimeoutError if nothing is left."""
    limit_s = min(remaining_s(), math.inf if timeout_s is None else timeout_s)
    if limit_s <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(None if math.isinf(limit_s) else limit_s)


class _TimedReader(io.RawIOBase):
    """What a socket receives, in the time that is left."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._timeout_s = sock, sock.gettimeout()
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        _limit(self._sock, self._timeout_s)
        try:
            return self._raw.readinto(buffer)
        finally:
            self._sock.settimeout(self._timeout_s)  # the next request may have more time

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_TimedReader(sock))

    def begin(self) -> None:
        """Reads the headers, without cookies: `requests` would parse all of them, even if it keeps none."""
        super().begin()
        for name in ("Set-Cookie", "Set-Cookie2"):
            del self.headers[name]
        size = sum(len(name) + len(value) for name, value in self.headers.items())
        if size > _MAX_HEADER_BYTES:
            limit = f"expected at most {_MAX_HEADER_BYTES} bytes of headers"
            raise RegistryError(f"server sent too much before its answer\n  {limit}, got {size}")


class _TimedConnection(HTTPConnection):
    response_class = _TimedResponse

    def _new_conn(self) -> socket.socket:
        """Connects, in a thread: neither a name's lookup nor the number of its addresses has a limit."""
        try:
            return call_in_time(self._connect, _MAX_CONNECT_S)
        except OutOfTimeError:
            raise TimeoutError("timed out") from None

    def _connect(self) -> socket.socket:
        sock = super()._new_conn()
        try:
            _limit(sock, sock.gettimeout())  # for the handshake of TLS, which has one timeout as a whole
        except TimeoutError:  # nobody waits for it any more
            sock.close()
            raise
        return sock

    def send(self, data: Any) -> None:
        if self.sock is not None:
            _limit(self.sock, self.sock.gettimeout())
        super().send(data)


class _Adapter(HTTPAdapter):
    """An adapter with timed connections, whatever their kind: TLS and proxies included."""

    def get_connection_with_tls_context(self, *arguments: Any, **options: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*arguments, **options)
        kind = pool.ConnectionCls  # once: another thread may set it meanwhile
        if not issubclass(kind, _TimedConnection):
            pool.ConnectionCls = type("TimedConnection", (_TimedConnection, kind), {})
        return pool
