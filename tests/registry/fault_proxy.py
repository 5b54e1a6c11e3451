"""A proxy that breaks connections to any server."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect", "content-length"}
)
_REWRITTEN = frozenset({"location", "link", "www-authenticate", "content-location"})
_BLOCK_BYTES = 64 * 1024
_UPSTREAM_TIMEOUT_S = 600.0


@dataclass
class Fault:
    """What to do to the next requests that fit.

    Attributes:
        act: `status` (answer that status after draining the body, forwarding nothing), `cut_request` (read
            `at_bytes` of the body, hand that much on, close), `cut_answer` (send `at_bytes` of the answer's
            body, then close), `replace` (send `body` instead), `pass` (nothing).
        method: Only requests of this method.
        path: Only requests in whose path and query this pattern is found.
        times: How often it acts; counted down.
        status: The status for `status`; replaces the server's for the others unless 0.
        headers: Headers to add to the answer.
        at_bytes: Where it acts.
        body: For `replace` and `status`.
        forward: Whether `cut_request` hands on what it read.
    """

    act: str
    method: str | None = None
    path: str = ""
    times: int = 1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    at_bytes: int = 0
    body: bytes = b""
    forward: bool = True


@dataclass
class FaultProxy:
    """What a test sees of the proxy: where it is, what passed, and what is to go wrong.

    Attributes:
        url: Of the proxy, without a slash at the end.
        upstream: Host and port of the server behind.
        faults: The first that fits a request and has times left acts.
        requests: Method and path with query of every request, in order of arrival.
        headers: The headers of each of them.
    """

    url: str
    upstream: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def clear(self):
        """Forgets faults and counts."""
        with self.lock:
            self.faults.clear()
            self.requests.clear()
            self.headers.clear()

    def take_fault(self, method, path, headers):
        """Notes a request and returns the fault that acts on it."""
        with self.lock:
            self.requests.append((method, path))
            self.headers.append(dict(headers))
            for fault in self.faults:
                fits = fault.method in (None, method) and re.search(fault.path, path)
                if fits and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: FaultProxy

    def handle_error(self, request, client_address):
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format, *args):
        pass

    def handle(self):
        with suppress(OSError, http.client.HTTPException):
            super().handle()

    def finish(self):
        with suppress(OSError):
            super().finish()

    def _serve(self):
        proxy = self.server.proxy
        fault = proxy.take_fault(self.command, self.path, dict(self.headers.items()))
        if fault is not None and fault.act == "status":
            self._answer_status(fault)
            return
        upstream = http.client.HTTPConnection(proxy.upstream, timeout=_UPSTREAM_TIMEOUT_S)
        try:
            if self._send_request(upstream, fault):
                self._send_answer(upstream.getresponse(), fault)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            upstream.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _read_body(self):
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            block = self.rfile.read1(min(left, _BLOCK_BYTES))
            if not block:
                raise ConnectionResetError("the client went away")
            left -= len(block)
            yield block

    def _send_request(self, upstream, fault):
        """Hands the request on; says whether there will be an answer."""
        cut = fault if fault is not None and fault.act == "cut_request" else None
        if cut is None or cut.forward:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    upstream.putheader(name, value)
            if "Content-Length" in self.headers:
                upstream.putheader("Content-Length", self.headers["Content-Length"])
            upstream.putheader("Connection", "close")
            upstream.endheaders()
        left = cut.at_bytes if cut else -1
        for block in self._read_body() if left else ():
            kept = block if cut is None else block[:left]
            # A server that answers before it has read everything may hang up; its answer still counts.
            with nullcontext() if cut else suppress(OSError):
                if cut is None or cut.forward:
                    upstream.send(kept)
            left -= len(kept)
            if left == 0:
                break
        self.close_connection = self.close_connection or cut is not None
        return cut is None

    def _answer_status(self, fault):
        for _ in self._read_body():
            pass
        self.send_response_only(fault.status)
        for name, value in fault.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(fault.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(fault.body)

    def _send_answer(self, answer, fault):
        act = fault.act if fault is not None else ""
        bodiless = self.command == "HEAD" or answer.status in (204, 304)
        length = answer.getheader("Content-Length")
        if fault is not None and act == "replace":
            length = str(len(fault.body))
        self.send_response_only(fault.status if fault is not None and fault.status else answer.status)
        proxy = self.server.proxy
        for name, value in answer.getheaders():
            if name.lower() in _REWRITTEN:
                value = value.replace(f"http://{proxy.upstream}", proxy.url)
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        for name, value in (fault.headers if fault is not None else {}).items():
            self.send_header(name, value)
        chunked = length is None and not bodiless
        if length is not None:
            self.send_header("Content-Length", length)
        elif chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if not bodiless:
            self._send_body(answer, fault, chunked=chunked)

    def _send_body(self, answer, fault, *, chunked):
        act = fault.act if fault is not None else ""
        for block in _spoil(iter(lambda: answer.read1(_BLOCK_BYTES), b""), fault):
            if chunked:
                self.wfile.write(b"%x\r\n" % len(block))
            self.wfile.write(block)
            if chunked:
                self.wfile.write(b"\r\n")
        # A server that announces more than it sends has to hang up, and so has its proxy.
        cut = bool(answer.length) and act != "replace"
        if cut or act == "cut_answer":
            self.close_connection = True
        elif chunked:
            self.wfile.write(b"0\r\n\r\n")


def _spoil(blocks, fault):
    """Yields an answer's body with the fault in it."""
    act, at = (fault.act, fault.at_bytes) if fault is not None else ("", 0)
    if fault is not None and act == "replace":
        yield fault.body
        return
    done = 0
    for block in blocks:
        if act == "cut_answer":
            block = block[: at - done]
        if not block:
            return
        done += len(block)
        yield block


@contextmanager
def fault_proxy(upstream_url):
    """Runs a proxy in front of a server until the block ends."""
    server = _Server(("127.0.0.1", 0), _Handler)
    upstream = urlsplit(upstream_url).netloc
    proxy = FaultProxy(f"http://127.0.0.1:{server.server_address[1]}", upstream)
    server.proxy = proxy
    server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
