"""The pool's end of a worker's socket: packets on their way out, in order, and packets that came."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque

from ortprep.errors import PoolError
from ortprep.runtime.pool.messages import MAX_PACKET_BYTES


class PacketChannel:
    """Packets to and from a worker; one that `is_broken` may have lost a packet.

    They are put down with the pool's lock held and sent without it: sending lets other threads run, and one
    that then wanted the lock would be put to sleep, and woken, for every request.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self.descriptor = connection, connection.fileno()
        self._packets: deque[bytes] = deque()
        self._sending = threading.Lock()
        self._buffer = memoryview(bytearray(MAX_PACKET_BYTES))
        self._is_closed = self.is_broken = False

    def put(self, packet: bytes) -> None:
        """Puts a packet down; the caller holds the pool's lock, which makes the order."""
        self._packets.append(packet)

    def flush(self) -> bool:
        """Sends what there is room for, unless another thread does, and returns whether that was all.

        What is put down while another thread sends, that thread sends.
        """
        while self._packets:
            if not self._sending.acquire(blocking=False):
                return True
            try:
                if not self._send():
                    return False
            finally:
                self._sending.release()
        return True

    def _send(self) -> bool:
        while self._packets:
            # Taken out before it is sent: broken off by a signal, a packet is lost, which shows, and never
            # sent twice, which would have a worker read memory that is somebody else's by then.
            packet = self._packets.popleft()
            try:
                if not self._is_closed:
                    self._socket.send(packet)
            except BlockingIOError:
                self._packets.appendleft(packet)
                return False
            except OSError:
                pass  # nobody reads any more, which is noticed elsewhere
            except BaseException:  # raised by a signal's handler
                self.is_broken = True
                raise
        return True

    def receive(self) -> memoryview | None:
        """Returns the next packet, valid until the next call; None if there is none now, empty at the end.

        Descriptors that came with it are closed by the kernel.

        Raises:
            PoolError: The packet is empty, and the worker has not closed its end.
        """
        while True:
            try:
                packet = self._buffer[: self._socket.recv_into(self._buffer)]
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # the worker ended with packets unread; those that it sent are still there
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
        self._socket.close()
