"""The host's process: how it is started and ended, and what it says of itself."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ortprep.errors import HostDiedError, HostError, PipelineError, from_dict, to_dict
from ortprep.runtime.descriptors import above_standard
from ortprep.runtime.host.folder import HostFolder, require_same_user
from ortprep.runtime.packets import REPORT, STATUS, read_json, receive, send, violation

if TYPE_CHECKING:
    import _socket

    from ortprep.runtime.host.models import HostConfig

_TICK_S = 1.0
_STOP_S = 10.0
_BOOTSTRAP = """\
import json, os, sys
job = json.load(sys.stdin)
if os.fork():
    os._exit(0)  # so that no client has to wait for the host's end
sys.path[:] = job.pop("path")
from ortprep.runtime.host.process import enter
enter(**job)
"""


def serve_models(
    config: HostConfig, folder: HostFolder | None = None, *, on_ready: Callable[[], None] | None = None
) -> bool:
    """Serves models until SIGTERM or SIGINT, or until nobody has asked for so long; for the main thread.

    Args:
        config: Models and limits.
        folder: The host's folder with its lock; None to find and lock it.
        on_ready: Called when clients can connect.

    Returns:
        Whether all requests were answered; otherwise a thread still runs one.

    Raises:
        HostError: A host runs already, or the folder is not safe to use.
    """
    from ortprep.runtime.host.server import Server

    if folder is None:
        folder = HostFolder(make=True)
        end = time.monotonic() + _TICK_S
        while not folder.acquire(wait=False):  # clients that look for a host have it for a moment
            if time.monotonic() > end:
                folder.close()
                raise HostError(f"a host runs already: {folder.path}", hint="ortprep host --stop")
            time.sleep(_TICK_S / 100)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    os.umask(0o077)
    server = Server(folder, config)
    if on_ready is not None:
        on_ready()
    while not stopped.wait(_TICK_S):
        server.models.trim()
        # Whether one is served is read first: an answer that ends meanwhile has set `last_s` by then.
        if config.idle_s is None or server.served:
            continue
        if time.monotonic() - server.last_s > config.idle_s:
            break
    is_done = server.stop(_STOP_S)
    folder.close()
    return is_done


def start_host(folder: HostFolder, *, idle_s: float, timeout_s: float) -> None:
    """Starts a host in the background, and waits until clients can connect.

    Args:
        folder: The host's folder with its lock, which the host inherits.
        idle_s: Seconds without a request after which the host ends.
        timeout_s: Seconds after which waiting is given up.

    Raises:
        HostDiedError: It ended before it was ready.
        TimeoutError: It is not ready yet.
        PipelineError: It could not start, for the reason given.
    """
    end = time.monotonic() + timeout_s
    reader, writer = map(above_standard, os.pipe())
    path = [os.path.abspath(entry) for entry in sys.path]
    job = {"path": path, "lock": folder.descriptor, "ready": writer, "idle_s": idle_s}
    with os.fdopen(reader, "rb") as pipe:
        try:
            subprocess.run(
                [sys.executable, "-P", "-c", _BOOTSTRAP],
                input=json.dumps(job).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(folder.descriptor, writer),
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error
        finally:
            os.close(writer)
        if not _wait(pipe.fileno(), end - time.monotonic()):
            raise TimeoutError
        report = pipe.readline()
    if not report:
        raise HostDiedError("host ended while it started", hint="call again   (ortprep host shows why)")
    failure = json.loads(report)
    if failure:
        raise from_dict(failure)


def enter(lock: int, ready: int, idle_s: float) -> None:
    """Is the main function of a host that a client starts; it does not return."""
    from ortprep.runtime.host.models import HostConfig

    def report(failure: dict[str, Any] | None = None) -> None:
        with suppress(BrokenPipeError):  # the client is gone
            os.write(ready, json.dumps(failure).encode() + b"\n")
        os.close(ready)

    os.chdir("/")
    try:
        serve_models(HostConfig(idle_s=idle_s), HostFolder(descriptor=lock), on_ready=report)
    except PipelineError as error:
        report(to_dict(error))
    os._exit(0)  # a thread may still run a request


def read_status(*, timeout_s: float = 5.0) -> dict[str, Any] | None:
    """Returns what this user's host says of itself, as JSON types; None if none runs.

    Raises:
        HostError: It does not answer in time, or is another user's.
    """
    with _found_host(timeout_s) as (_, sock):
        if sock is None:
            return None
        try:
            send(sock, STATUS)
            packet = receive(sock, "host")
        except ConnectionError:  # it is ending
            return None
        except TimeoutError:
            problem = f"host is busy: process {require_same_user(sock)} did not answer within {timeout_s:g} s"
            raise HostError(problem, hint="ortprep host --stop") from None
        if packet is None:
            return None
        if packet.kind != REPORT:
            raise violation("host", f"expected its status, got a packet of kind {packet.kind}")
        return read_json(packet, "host")


def stop_host(*, timeout_s: float = _STOP_S + 5) -> int | None:
    """Ends this user's host after the requests that it runs, or kills it after `timeout_s`.

    Returns:
        Its process number; None if none runs.

    Raises:
        HostError: The process at the socket is another user's, or of another PID namespace.
    """
    with _found_host(timeout_s) as (folder, sock):
        pid = None
        if folder is not None and sock is not None:
            pid = require_same_user(sock)
            if pid == 0:
                problem = f"host runs in another PID namespace, and cannot be ended from here: {folder.path}"
                raise HostError(problem, hint="ortprep host --stop   (in the container that runs it)")
            with suppress(ProcessLookupError):
                _end_process(pid, timeout_s)
        if folder is not None and folder.acquire(wait=False):
            folder.remove_socket()  # that of a host that was killed
        return pid


@contextmanager
def _found_host(timeout_s: float) -> Iterator[tuple[HostFolder | None, _socket.socket | None]]:
    """Yields the host's folder and a connection to it, as far as there are such."""
    try:
        folder = HostFolder()
    except FileNotFoundError:
        yield None, None
        return
    try:
        sock = folder.connect(timeout_s)
        try:
            yield folder, sock
        finally:
            if sock is not None:
                sock.close()
    finally:
        folder.close()


def _end_process(pid: int, timeout_s: float) -> None:
    """Ends a process by SIGTERM, and by SIGKILL after a timeout."""
    process = os.pidfd_open(pid)
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(process, number)
            if _wait(process, timeout_s):
                return
    finally:
        os.close(process)


def _wait(descriptor: int, timeout_s: float) -> bool:
    """Returns whether a descriptor, which may be above 1023, can be read before a timeout."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
