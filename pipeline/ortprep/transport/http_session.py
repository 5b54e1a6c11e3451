"""HTTP sessions that keep nothing of a server's and log no secrets; their requests can be ended at any time.

A server can keep a request waiting before its answer begins: in the handshake of TLS, with `100 Continue` for
ever, or with a byte of a header now and then. So a request knows its socket as soon as there is one, and
another thread can shut it down.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from contextvars import ContextVar
from http.cookiejar import DefaultCookiePolicy
from threading import Lock
from typing import Any, TypeVar

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection

from ortprep.spec.urls import hide_queries_in_logs
from ortprep.transport.time_limit import call_in_time
from ortprep.transport.transfer import BLOCK_BYTES

T = TypeVar("T")

UNENCODED = {"Accept-Encoding": "identity"}
"""Headers of every request: a small compressed answer can become gigabytes, and has no offsets."""

_CONNECTIONS = 16


def make_session() -> requests.Session:
    """Returns a session that asks for unencoded answers and keeps no cookies: a server may send gigabytes."""
    session, adapter = requests.Session(), _Adapter()
    session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    session.headers.update(UNENCODED)
    adapter.init_poolmanager(_CONNECTIONS, _CONNECTIONS, blocksize=BLOCK_BYTES)
    session.mount("https://", adapter)
    session.mount("http://", adapter)
    hide_queries_in_logs("urllib3")
    return session


def request_in_time(call: Callable[[], T], limit_s: float) -> T:
    """Returns what a call returns that sends requests of such a session; after so many seconds they end.

    Raises:
        OutOfTimeError: It takes longer; see `call_in_time`.
    """
    sockets = _Sockets()

    def run() -> T:
        _current.set(sockets)  # in the context of the call's own thread
        with closing(sockets):
            return call()

    return call_in_time(run, limit_s, abort=sockets.shut_down)


def track_socket(descriptor: int) -> None:
    """Has the `request_in_time` that this runs in, if any, shut a socket down when its time is over."""
    sockets = _current.get()
    if sockets is not None:
        sockets.add(descriptor)


class _Sockets:
    """Duplicates of a call's sockets: TLS closes a connection's first socket object before its handshake."""

    def __init__(self) -> None:
        self._duplicates: list[socket.socket] = []
        self._is_late = False
        self._lock = Lock()

    def add(self, descriptor: int) -> None:
        with self._lock:
            self._duplicates.append(socket.socket(fileno=os.dup(descriptor)))
        if self._is_late:
            self.shut_down()

    def shut_down(self) -> None:
        with self._lock:
            self._is_late = True
            for duplicate in self._duplicates:
                with suppress(OSError):  # the server was faster
                    # Both directions: else what the server goes on sending would still be read.
                    duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            while self._duplicates:
                self._duplicates.pop().close()


_current: ContextVar[_Sockets | None] = ContextVar("sockets", default=None)


class _TrackedConnection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        sock = super()._new_conn()
        track_socket(sock.fileno())
        return sock

    def request(self, *arguments: Any, **options: Any) -> None:
        if self.sock is not None:  # kept from an earlier request
            track_socket(self.sock.fileno())
        super().request(*arguments, **options)


class _Adapter(HTTPAdapter):
    """An adapter with tracked connections, whatever their kind: TLS and proxies included."""

    def get_connection_with_tls_context(self, *arguments: Any, **options: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*arguments, **options)
        kind = pool.ConnectionCls  # once: another thread may set it meanwhile
        if not issubclass(kind, _TrackedConnection):
            pool.ConnectionCls = type("TrackedConnection", (_TrackedConnection, kind), {})
        return pool
