"""Descriptors that another process sends, which nobody here asks for, and how all are closed.

To close a descriptor that another process sent can take as long as that process likes. A socket may linger,
a file system that a program serves (FUSE) may not answer, a terminal may have to drain. The kernel, too,
closes: what `recvmsg` has no room for, and what is still in the queue of a socket that is closed. So who
receives packets of others makes room for all, and closes on a thread of its own.
"""

from __future__ import annotations

import _socket
import _thread
import contextlib
import os
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ANCILLARY_BYTES = _socket.CMSG_SPACE(4 * 253)
"""Bytes of ancillary data that hold all descriptors which Linux sends with one packet (`SCM_MAX_FD`)."""

_MAX_WAIT_S = 0.2
_NO_LINGERING = struct.pack("ii", 1, 0)


def above_standard(descriptor: int) -> int:
    """Returns a descriptor with a number from 3, so that a child process can be given it.

    A program without standard streams gets their numbers for what it opens; in a child they are its streams.
    """
    if descriptor > 2:
        return descriptor
    import fcntl

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def close_received(ancillary: Iterable[tuple[int, int, Any]]) -> None:
    """Closes the descriptors in ancillary data, as `recvmsg` returns it, sockets without lingering."""
    values = [value for _, kind, value in ancillary if kind == _socket.SCM_RIGHTS]
    descriptors = [descriptor for value in values for (descriptor,) in struct.iter_unpack("i", value)]

    def close_all() -> None:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                try:
                    received = _socket.socket(fileno=descriptor)
                except OSError:  # it is no socket
                    os.close(descriptor)
                    continue
                with contextlib.suppress(OSError):
                    received.setsockopt(_socket.SOL_SOCKET, _socket.SO_LINGER, _NO_LINGERING)
                received.close()

    close_aside(close_all)


_postponed: list[Callable[[], object]] = []


def close_aside(close: Callable[[], object]) -> None:
    """Calls a function that closes descriptors on a thread of its own, and waits for up to 0.2 s.

    If there is no thread to be had, that of a later call calls it.
    """
    is_closed = _thread.allocate_lock()
    is_closed.acquire()

    def run() -> None:
        try:
            close()
        finally:
            is_closed.release()
        with contextlib.suppress(IndexError):
            close_aside(_postponed.pop())

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # not closed on this thread, which has others to answer; or the interpreter ends
        _postponed.append(close)
    else:
        is_closed.acquire(timeout=_MAX_WAIT_S)
