"""The pool's end of a worker's socket."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

from ortprep.errors import PoolError
from ortprep.runtime.ipc import (
    ANCILLARY_BYTES,
    MAX_PACKET_BYTES,
    close_aside,
    close_descriptors,
    find_descriptors,
)
from ortprep.runtime.pool.messages import Head, MessageKind, decode_head

_ASK_TIMEOUT_S = 1.0
_FLAGS = socket.MSG_CMSG_CLOEXEC
_MAX_PID = 2**22  # of Linux, `PID_MAX_LIMIT`


class PacketChannel:
    """The pool's end of a worker's socket: packets on their way out, in order, and packets that came.

    They are put down with the pool's lock held and sent without it: sending lets other threads run, and one
    that then wanted the lock would be put to sleep, and woken, for every request.

    Attributes:
        is_lost: Whether `ask` got no answer, after which it asks no more: a late one would answer the next.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self.descriptor = connection, connection.fileno()
        self._packets: deque[bytes] = deque()
        self._sending = threading.Lock()
        self._buffer = memoryview(bytearray(MAX_PACKET_BYTES))
        self._is_closed = self.is_lost = False

    def put(self, packet: bytes) -> None:
        """Puts a packet down; the caller holds the pool's lock, which makes the order."""
        self._packets.append(packet)

    def flush(self) -> bool:
        """Sends what there is room for, unless another thread does, and returns whether that was all.

        What is put down while another thread sends, that thread sends.
        """
        while self._packets:
            if self._sending.locked():
                return True
            with self._sending:  # in one step, which no signal's handler breaks off; sending never waits
                if not self._send():
                    return False
        return True

    def _send(self) -> bool:
        """Sends what waits, or drops it where nobody reads; returns whether nothing is left."""
        while self._packets:
            try:
                if not self._is_closed:
                    self._socket.send(self._packets[0])
            except BlockingIOError:
                return False
            except OSError:
                pass  # nobody reads any more, which is noticed elsewhere
            # Broken off by a signal before this, a packet is sent twice: its worker passes over the second.
            self._packets.popleft()
        return True

    def ask(self, packet: bytes, descriptors: Sequence[int], kind: MessageKind) -> Head:
        """Sends a packet, with descriptors, and returns the head of the one that comes back.

        Raises:
            ConnectionError: No answer of that kind comes in time, or one before did not.
        """
        if self.is_lost:
            raise ConnectionError("template does not answer: it did not answer before")
        self.is_lost, number = True, decode_head(memoryview(packet), "the pool").number
        try:
            socket.send_fds(self._socket, [packet], descriptors)
            poll = select.poll()
            poll.register(self.descriptor, select.POLLIN)
            if not poll.poll(_ASK_TIMEOUT_S * 1000):
                raise TimeoutError(f"nothing came within {_ASK_TIMEOUT_S:g} s")
            head = decode_head(self.receive() or memoryview(b""), "a template")
        except (OSError, PoolError) as error:
            raise ConnectionError(f"template does not answer: {error}") from error
        if head.kind is not kind:
            raise ConnectionError(f"template answers {head.kind.name} instead of {kind.name}")
        if number and head.number != number:
            raise ConnectionError(f"template answers for process {head.number} instead of {number}")
        if not _is_possible(head):
            raise ConnectionError(f"template answers with impossible numbers: {head.number}, {head.figure}")
        self.is_lost = False
        return head

    def receive(self) -> memoryview | None:
        """Returns the next packet, valid until the next call; None if there is none now, empty at the end.

        Raises:
            PoolError: It has descriptors, or is empty, and the worker has not closed its end.
        """
        while True:
            try:
                size, ancillary, flags, _ = self._socket.recvmsg_into([self._buffer], ANCILLARY_BYTES, _FLAGS)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # the worker ended with packets unread; those that it sent are still there
            if ancillary or flags & socket.MSG_CTRUNC:
                close_aside(partial(close_descriptors, find_descriptors(ancillary)))
                raise PoolError("unreadable message\n  expected a packet, got one with descriptors")
            packet = self._buffer[:size]
            if not packet and not self._is_at_end():
                raise PoolError("unreadable message\n  expected a head, got an empty packet")
            return packet

    def _is_at_end(self) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, 0)
        return bool(poll.poll(0))

    def close(self, *, waits: bool = True) -> None:
        """Closes the socket, once no thread sends; a fork of the process must not wait for one."""
        if waits:
            with self._sending:
                self._is_closed = True
            close_aside(self._socket.close)
        else:
            self._socket.close()


def _is_possible(head: Head) -> bool:
    """Returns whether an answer has a process, and the number of an error or how a process ended."""
    if head.number > _MAX_PID or head.figure >= 2**16:
        return False
    return head.kind is not MessageKind.REAPED or os.WIFEXITED(head.figure) or os.WIFSIGNALED(head.figure)
