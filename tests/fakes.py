"""A web server that can misbehave and counts what it sends, states of processes, and the clock of files."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = Callable[["Handler", "FileServer", bytes], None]
"""Answers one request for a file of that content."""


@dataclass
class FileServer:
    """What is served, how, and what was asked.

    Attributes:
        url: Where the server listens, without a slash at the end.
        files: Content by path.
        script: Answers to the first requests, one each; later ones get `send_range`.
        requests: Path and headers of every request.
        sent_bytes: Bytes of bodies handed to the network.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    script: list[Answer] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    sent_bytes: int = 0


class Handler(BaseHTTPRequestHandler):
    """One request."""

    shared: FileServer
    timeout = 60.0
    """Seconds after which a client that neither sends nor reads is given up."""

    def do_GET(self):
        self.shared.requests.append((self.path, dict(self.headers)))
        content = self.shared.files.get(self.path.partition("?")[0])
        if content is None:
            send_status(404)(self, self.shared, b"")
            return
        answer = self.shared.script.pop(0) if self.shared.script else send_range
        answer(self, self.shared, content)

    def body(self, data):
        # Counted before it leaves: the client may look as soon as the last byte is there.
        self.shared.sent_bytes += len(data)
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


class Server(ThreadingHTTPServer):
    """Waits for its last answers when it is closed, so that none of them ends in another test."""

    daemon_threads = False


def send_whole(handler, server, content):
    """Sends everything, whatever was asked."""
    _head(handler, 200, len(content))
    handler.body(content)


def send_range(handler, server, content):
    """Sends what was asked, as a server with ranges does."""
    wanted = handler.headers.get("Range")
    if wanted is None:
        send_whole(handler, server, content)
        return
    start = int(wanted.removeprefix("bytes=").rstrip("-"))
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    _finish_head(handler, len(content) - start)
    handler.body(content[start:])


def send_cut(at):
    """Sends that many bytes and hangs up, though it announced all."""

    def answer(handler, server, content):
        _head(handler, 200, len(content))
        handler.body(content[:at])
        handler.close_connection = True

    return answer


def send_status(status, **headers):
    """Sends an empty answer with that status."""

    def answer(handler, server, content):
        handler.send_response(status)
        for name, text in headers.items():
            handler.send_header(name, text)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def _head(handler, status, length):
    handler.send_response(status)
    _finish_head(handler, length)


def _finish_head(handler, length):
    handler.send_header("Content-Length", str(length))
    handler.end_headers()


@contextmanager
def serve():
    """Runs a server on a free port until the block ends."""
    shared = FileServer()
    with listening(type("BoundHandler", (Handler,), {"shared": shared})) as shared.url:
        yield shared


@contextmanager
def listening(handler):
    """Has requests answered on a free port until the block ends; gives its URL."""
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_FIRST_PORT, _LAST_PORT = 20_000, 32_000
"""Below those that Linux gives to clients, any of which could take a port before its server does."""


def free_port():
    """Returns a port on which nothing listens just now."""
    while True:
        port = random.SystemRandom().randint(_FIRST_PORT, _LAST_PORT)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def wait_for(condition, *, what, timeout_s=300):
    """Waits until a condition holds and returns what it gave; fails the test if it never does."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)
    return value


def stat_of(pid):
    """Returns what the kernel says of a process, from its state on; of one that is gone, as of a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", *["0"] * 50]


def is_alive(pid):
    """Says whether a process runs; a zombie does not."""
    return stat_of(pid)[0] not in "ZX"


def freeze(pid):
    """Stops a process; its threads stop one by one, on a busy machine late, and the last could answer."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_for(
        lambda: all(stat_of(f"{pid}/task/{one.name}")[0] == "T" for one in threads.iterdir()),
        what="all threads stand still",
    )


def wait_for_a_tick(path):
    """Waits until a change would get a later time than the last one of `path` has.

    Without it, a test on a fast machine may change a file twice within a tick; no program can see that.
    """
    probe = path.with_name(f"{path.name}.tick")
    last_ns = path.stat().st_ctime_ns
    probe.touch()
    while probe.stat().st_ctime_ns <= last_ns:
        time.sleep(0.001)
        probe.touch()
    probe.unlink()


@contextmanager
def trickling_server(before, endless=b"x", *, first=b""):
    """A server that sends some bytes of an answer at once, and then others every 20 ms, for ever.

    If there is a `first` answer, it does so with the second request on a connection.
    """
    ended = threading.Event()

    def answer(connection):
        with connection, suppress(OSError):
            connection.recv(65536)
            if first:
                connection.sendall(first)
                connection.recv(65536)
            connection.sendall(before)
            while not ended.wait(0.02):
                connection.sendall(endless)

    def accept(listener):
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/m.onnx"
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def lingering(count):
    """Sockets whose last `close` takes an hour, or until this ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers, descriptors = [], []
        for _ in range(count):
            sock = socket.create_connection(listener.getsockname())
            peers.append(listener.accept()[0])
            sock.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sock.send(bytes(2**16))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
            descriptors.append(sock.detach())
        yield descriptors
        for peer in peers:
            peer.close()


class Interruption:
    """Raises as a signal's handler may: when a function begins, or one of C has returned.

    Args:
        moment: Number of such moments of this package and of its context managers that pass before.
    """

    def __init__(self, moment):
        self.left = moment

    def __call__(self, frame, event, _):
        file = frame.f_code.co_filename
        if event in ("call", "c_return") and ("/ortprep/runtime/" in file or file.endswith("contextlib.py")):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt


class Interrupted(BaseException):
    """What a signal handler raises."""


def is_interrupted(work, at):
    """Does some work, and raises at a step where Python calls signal handlers; False if it has fewer."""
    steps = 0

    def count(_frame, event, _):
        nonlocal steps
        steps += event in ("call", "c_return")
        if steps == at:
            sys.setprofile(None)
            raise Interrupted

    before = sys.getprofile()
    try:
        sys.setprofile(count)
        work()
    except (Interrupted, OSError):
        # `shutil.rmtree` turns an interruption between two of its statements into an `OSError`.
        return True
    finally:
        sys.setprofile(before)
    return False
