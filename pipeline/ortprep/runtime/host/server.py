"""The host's threads: each waits for any connection, answers one packet, and waits again.

To load a model, to follow a path or to run can take any time. So a thread that is about to answer starts
another one where too few would wait, and ends afterwards where enough do.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import math
import os
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

from ortprep.errors import HostError, NoRoomError, RequestTimeoutError, to_dict
from ortprep.runtime.host import packets
from ortprep.runtime.host.folder import HostFolder, require_same_user
from ortprep.runtime.host.models import HostConfig, ModelTable
from ortprep.runtime.ipc import close_aside
from ortprep.runtime.loading.load_options import Deadline
from ortprep.runtime.machine.memory import private_bytes
from ortprep.runtime.machine.processor import usable_cores
from ortprep.runtime.tensors.element_types import Array

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
_MIN_WAITING, _MAX_WAITING = 2, 16  # threads; one may be taking a client in
_TURN_TIMEOUT_S = 1.0
_ONCE = select.EPOLLIN | select.EPOLLONESHOT  # to one thread
_NO_DESCRIPTORS_DELAY_S = 0.05


class Server:
    """Serves connections from when it is made until `stop`.

    Args:
        folder: Folder of the host, whose lock is held.
        config: Models and limits.

    Attributes:
        models: Table of the models.
        last_s: End of the last answer, by `time.monotonic()`.
        served: Number of packets that are being answered.
    """

    def __init__(self, folder: HostFolder, config: HostConfig) -> None:
        self.models = ModelTable(config)
        self.served, self._requests = 0, 0
        self.last_s = self._began_s = time.monotonic()
        self._folder, self._listener = folder, socket.socket(fileno=folder.listen().detach())
        self._connections: dict[int, tuple[socket.socket, str]] = {}  # with the folder of the model it opened
        self._lock = threading.Lock()
        self._stopping, self._wakeup = False, os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._epoll.register(self._listener, _ONCE)
        self._max_waiting = min(_MAX_WAITING, usable_cores() + 2)
        # More runs at once slow each other down. One that does not end has the others wait for a second.
        self._turns = threading.BoundedSemaphore(self._max_waiting)
        self._threads: set[threading.Thread] = set()
        self._waiting = 0
        self.keep_waiting()
        if not self._waiting:
            raise HostError("host cannot start\n  expected a thread, got none", hint="ulimit -u")

    def stop(self, timeout_s: float) -> bool:
        """Ends after the requests that run, and returns whether they were answered in time."""
        self._folder.remove_socket()  # first, so that clients look for another host from now on
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)
        end = time.monotonic() + timeout_s
        for thread in tuple(self._threads):
            thread.join(max(0.0, end - time.monotonic()))
        close_aside(self._close_all)
        return not self.served

    def _close_all(self) -> None:
        for sock in (self._listener, *(sock for sock, _ in tuple(self._connections.values()))):
            with contextlib.suppress(OSError):
                sock.close()

    def keep_waiting(self) -> None:
        """Starts threads where too few wait; if there is none to be had, a later call does."""
        while True:
            with self._lock:
                if self._waiting >= _MIN_WAITING:
                    return
                self._waiting += 1
            try:
                threading.Thread(target=self._serve, daemon=True).start()
            except (RuntimeError, MemoryError) as error:
                log.warning("cannot start a thread: %s", error)
                with self._lock:
                    self._waiting -= 1
                return

    def _serve(self) -> None:
        """Takes clients in and answers packets, in a thread of its own."""
        self._threads.add(threading.current_thread())
        listener = self._listener.fileno()
        while not self._stopping:
            ((descriptor, _),) = self._epoll.poll(None, 1)
            if descriptor == listener:
                try:
                    self._accept()
                finally:
                    self._epoll.modify(listener, _ONCE)
            elif descriptor != self._wakeup:
                with self._lock:
                    self.served += 1
                    self._waiting -= 1
                self.keep_waiting()
                self._serve_connection(descriptor)
                with self._lock:
                    if self._waiting >= self._max_waiting:
                        self._threads.discard(threading.current_thread())
                        return
                    self._waiting += 1

    def _accept(self) -> None:
        """Takes a client in, if it is of this user and there is room."""
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # it left meanwhile, or there is no descriptor
            log.debug("cannot take a client: %s", error)
            time.sleep(_NO_DESCRIPTORS_DELAY_S)
            return
        sock.setblocking(False)
        try:
            require_same_user(sock)
        except HostError as error:
            log.warning("refused a client: %s", error)
            close_aside(sock.close)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            _send_failure(sock, NoRoomError(f"host is full\n  expected at most {MAX_CONNECTIONS} clients"))
            close_aside(sock.close)
            return
        self._connections[sock.fileno()] = sock, ""
        try:
            self._epoll.register(sock, _ONCE)
        except OSError as error:  # no memory, or too many watches
            log.warning("cannot take a client: %s", error)
            del self._connections[sock.fileno()]
            close_aside(sock.close)

    def _serve_connection(self, descriptor: int) -> None:
        """Answers one packet of a client, and closes its connection if that was its last."""
        sock, folder = self._connections[descriptor]
        packet, is_open = None, False
        try:
            packet = packets.receive(sock, "client")
            if packet is not None:
                self._connections[descriptor] = sock, self._answer(sock, packet, folder)
                is_open = True
        except (HostError, MemoryError) as error:  # it breaks the protocol, or asks for too much
            log.warning("%s", error)
            _send_failure(sock, error)
        except Exception as error:  # noqa: BLE001 - it left or does not read, and the thread is to go on
            log.debug("lost a client: %s", error)
        with self._lock:
            if packet is not None:  # before `served`, which is read before it
                self.last_s = time.monotonic()
            self.served -= 1
        if is_open:
            self._epoll.modify(descriptor, _ONCE)
        else:
            del self._connections[descriptor]
            close_aside(sock.close)

    def _answer(self, sock: socket.socket, packet: packets.Packet, folder: str) -> str:
        """Answers a packet, and returns the folder of the model that the client has opened."""
        kind: int = packets.FAILED
        reply: dict[str, Any] = {}
        try:
            if _has_unread_answer(sock):  # answers take memory until they are read
                raise packets.violation("client", "packet before the last answer was read")
            if packet.kind == packets.OPEN:
                kind, folder = packets.OPENED, self.models.find_folder(os.fsdecode(packet.text))
                with self.models.use(folder, _deadline_of(packet, folder)):
                    pass
            elif packet.kind == packets.RUN and folder:
                kind, reply = packets.DONE, self._run(packet, folder)
            elif packet.kind == packets.STATUS:
                kind, reply = packets.REPORT, self.describe()
            else:
                raise packets.violation("client", f"packet of kind {packet.kind} before a model was opened")
        except HostError:
            raise
        except Exception as error:  # noqa: BLE001 - errors of ONNX Runtime cross to the client
            kind, reply = packets.FAILED, to_dict(error)
        if kind == packets.DONE:
            packets.send_arrays(sock, packets.DONE, reply, packets.Region)
        else:
            _send_json(sock, kind, reply)
        return folder

    def _run(self, packet: packets.Packet, folder: str) -> dict[str, Array]:
        """Returns the outputs of a run."""
        _require_time(packet)
        with self.models.use(folder, _deadline_of(packet, folder)) as model:
            with self._lock:
                self._requests += 1
            return model.run(packet.arrays, turn=self._turn(packet))

    @contextlib.contextmanager
    def _turn(self, packet: packets.Packet) -> Iterator[None]:
        """Waits for a turn, for a second at most; raises `RequestTimeoutError` if nobody waits any more."""
        remaining_s = (packet.deadline_ns - time.monotonic_ns()) / 1e9 if packet.deadline_ns > 0 else math.inf
        has_turn = self._turns.acquire(timeout=max(0.0, min(_TURN_TIMEOUT_S, remaining_s)))
        try:
            _require_time(packet)
            yield
        finally:
            if has_turn:
                self._turns.release()

    def describe(self) -> dict[str, Any]:
        """Returns what `ortprep host --status` shows, as JSON types: as many models as fit a packet."""
        models = self.models.describe()
        sizes = itertools.accumulate(len(json.dumps(model)) for model in models)
        shown = sum(size < packets.MAX_TEXT_BYTES // 2 for size in sizes)
        return {
            "pid": os.getpid(),
            "up_s": round(time.monotonic() - self._began_s, 1),
            "clients": len(self._connections) - 1,  # but for the one that asks
            "requests": self._requests,
            "private_bytes": private_bytes(),
            "models": models[:shown],
            "models_left_out": len(models) - shown,
        }


def _require_time(packet: packets.Packet) -> None:
    if 0 < packet.deadline_ns < time.monotonic_ns():
        raise RequestTimeoutError("request was not run: its deadline passed while the host was busy")


def _deadline_of(packet: packets.Packet, folder: str) -> Deadline:
    remaining_s = max(0, packet.deadline_ns - time.monotonic_ns()) / 1e9
    return Deadline(remaining_s if packet.deadline_ns > 0 else None, subject=folder)


def _has_unread_answer(sock: socket.socket) -> bool:
    """Returns whether the other side has not read all that it was sent (`SIOCOUTQ`)."""
    return struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))) > (0,)


def _send_json(sock: socket.socket, kind: int, content: dict[str, Any]) -> None:
    """Sends JSON types; of an error that is too long, the beginning of its message."""
    text = json.dumps(content).encode()
    if len(text) > packets.MAX_TEXT_BYTES:
        message = str(content.get("message"))[: packets.MAX_TEXT_BYTES // 8]
        text = json.dumps({"kind": content.get("kind"), "message": message}).encode()
    packets.send(sock, kind, text)


def _send_failure(sock: socket.socket, error: BaseException) -> None:
    """Sends an error to a client whose connection is closed then, if it takes that."""
    with contextlib.suppress(OSError):
        _send_json(sock, packets.FAILED, to_dict(error))
