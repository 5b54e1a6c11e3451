"""The host's threads: one takes clients in, and each client has one that answers its packets."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from ortprep.errors import HostError, NoRoomError, RequestTimeoutError, to_dict
from ortprep.runtime import packets
from ortprep.runtime.descriptors import close_aside
from ortprep.runtime.host.folder import HostFolder, require_same_user
from ortprep.runtime.host.models import HostConfig, ModelTable
from ortprep.runtime.loading.load_options import Deadline
from ortprep.runtime.machine.memory import private_bytes
from ortprep.runtime.machine.processor import usable_cores
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import check_inputs

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
_MAX_RUNS = 16
_TURN_TIMEOUT_S = 1.0
_SEND_TIMEOUT = struct.pack("ll", 60, 0)
"""Seconds and microseconds after which a client that does not read its answer is given up."""

_RETRY_DELAY_S = 0.05
"""Pause after a client could not be taken in, for want of descriptors, say."""


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
        self._lock = threading.Lock()
        self._stopping = False
        # More runs at once slow each other down. One that does not end has the others wait for a second.
        self._turns = threading.BoundedSemaphore(min(_MAX_RUNS, usable_cores() + 2))
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._accepting = threading.Thread(target=self._accept_clients, daemon=True)
        try:
            self._accepting.start()
        except RuntimeError as error:
            raise HostError("host cannot start\n  expected a thread, got none", hint="ulimit -u") from error

    def stop(self, timeout_s: float) -> bool:
        """Ends after the requests that run, and returns whether they were answered in time."""
        self._folder.remove_socket()  # first, so that clients look for another host from now on
        self._stopping = True
        self._listener.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + timeout_s
        self._accepting.join(timeout_s)  # from then on there are no new clients
        with self._lock:
            clients = dict(self._clients)
        for sock in clients:
            with contextlib.suppress(OSError):  # it has just been closed
                sock.shutdown(socket.SHUT_RD)
        for thread in clients.values():
            thread.join(max(0.0, end - time.monotonic()))
        close_aside(self._listener.close)
        return not self.served

    def _accept_clients(self) -> None:
        """Takes clients in, in a thread of its own."""
        while not self._stopping:
            try:
                sock, _ = self._listener.accept()
                self._accept(sock)
            except OSError as error:  # it left, or there is no descriptor, and others may come
                log.debug("cannot take a client: %s", error)
                time.sleep(0 if self._stopping else _RETRY_DELAY_S)

    def _accept(self, sock: socket.socket) -> None:
        """Starts the thread of a client, if it is of this user and there is room."""
        sock.setblocking(True)  # whatever the program's default timeout is
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        try:
            require_same_user(sock)
            if len(self._clients) >= MAX_CONNECTIONS:
                raise NoRoomError(f"host is full\n  expected at most {MAX_CONNECTIONS} clients")
            thread = threading.Thread(target=self._serve_client, args=(sock,), daemon=True)
            with self._lock:
                self._clients[sock] = thread
            thread.start()
        except (HostError, NoRoomError, RuntimeError, MemoryError) as error:
            log.warning("refused a client: %s", error)
            with self._lock:
                self._clients.pop(sock, None)
            if not isinstance(error, HostError):  # another user gets no word
                _send_failure(sock, error)
            close_aside(sock.close)

    def _serve_client(self, sock: socket.socket) -> None:
        """Answers the packets of a client, in a thread of its own, until one of the two ends."""
        model: str | None = ""
        try:
            while model is not None and not self._stopping:
                model = self._serve_packet(sock, model)
        finally:
            with self._lock:
                del self._clients[sock]
            sock.close()  # which may take as long as the client likes

    def _serve_packet(self, sock: socket.socket, model: str) -> str | None:
        """Answers one packet of a client; returns its model, None if that was its last packet."""
        packet, opened = None, None
        try:
            packet = packets.receive(sock, "client")
            if packet is not None:
                with self._lock:
                    self.served += 1
                opened = self._answer(sock, packet, model)
        except (HostError, NoRoomError, MemoryError) as error:  # it breaks the protocol, or asks for too much
            log.warning("%s", error)
            _send_failure(sock, error)
        except OSError as error:  # it left, or does not read
            log.debug("lost a client: %s", error)
        finally:
            if packet is not None:
                with self._lock:
                    self.last_s = time.monotonic()  # before `served`, which is read before it
                    self.served -= 1
        return opened

    def _answer(self, sock: socket.socket, packet: packets.Packet, model: str) -> str:
        """Answers a packet, and returns the model that the client has opened, as it named it."""
        kind: int = packets.FAILED
        reply: dict[str, Any] = {}
        try:
            if packet.kind == packets.OPEN:
                kind, model = packets.OPENED, os.fsdecode(packet.text)
                with self.models.use(model, _deadline_of(packet, model)):
                    pass
            elif packet.kind == packets.RUN and model:
                kind, reply = packets.DONE, self._run(packet, model)
            elif packet.kind == packets.STATUS:
                kind, reply = packets.REPORT, self.describe()
            else:
                raise packets.violation("client", f"packet of kind {packet.kind} before a model was opened")
        except HostError:
            raise
        except Exception as error:  # noqa: BLE001 - a boundary: whatever it is, the client is told
            kind, reply = packets.FAILED, to_dict(error)
        if kind == packets.DONE:
            packets.send_arrays(sock, packets.DONE, reply)
        else:
            packets.send_json(sock, kind, reply)
        return model

    def _run(self, packet: packets.Packet, model: str) -> dict[str, Array]:
        """Returns the outputs of a run."""
        _require_time(packet)
        with self.models.use(model, _deadline_of(packet, model)) as loaded:
            with self._lock:
                self._requests += 1
            with self._turn(packet):
                return loaded.run(check_inputs(loaded.signature, packet.arrays))

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
            "clients": len(self._clients) - 1,  # but for the one that asks
            "requests": self._requests,
            "private_bytes": private_bytes(),
            "models": models[:shown],
            "models_left_out": len(models) - shown,
        }


def _require_time(packet: packets.Packet) -> None:
    if 0 < packet.deadline_ns < time.monotonic_ns():
        raise RequestTimeoutError("request was not run: its deadline passed while the host was busy")


def _deadline_of(packet: packets.Packet, model: str) -> Deadline:
    remaining_s = max(0, packet.deadline_ns - time.monotonic_ns()) / 1e9
    return Deadline(remaining_s if packet.deadline_ns > 0 else None, subject=model)


def _send_failure(sock: socket.socket, error: BaseException) -> None:
    """Sends an error to a client whose connection is closed then, if it takes that."""
    with contextlib.suppress(OSError):
        packets.send_json(sock, packets.FAILED, to_dict(error))
