"""Descriptors that processes share: memory files without a name, and what another process sends.

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
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from ortprep.runtime.packets import Places

ANCILLARY_BYTES = _socket.CMSG_SPACE(4 * 253)
"""Bytes of ancillary data that hold all descriptors which Linux sends with one packet (`SCM_MAX_FD`)."""

_MAX_WAIT_S = 0.2
_NO_LINGERING = struct.pack("ii", 1, 0)


def create_memory(size: int = 0) -> int:
    """Returns the descriptor of a new memory file that can grow but not shrink.

    Raises:
        OSError: There is no descriptor to be had, or no file is so large.
    """
    import fcntl  # here, as a client with small requests needs no memory

    descriptor = os.memfd_create("ortprep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def find_descriptors(ancillary: Iterable[tuple[int, int, Any]]) -> list[int]:
    """Returns the descriptors in ancillary data, as `recvmsg` returns it."""
    values = (value for _, kind, value in ancillary if kind == _socket.SCM_RIGHTS)
    return [descriptor for value in values for (descriptor,) in struct.iter_unpack("i", value)]


def close_descriptors(descriptors: Iterable[int]) -> None:
    """Closes descriptors of any kind, sockets without lingering; see `close_aside`."""
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


def find_seals(descriptor: int) -> int | None:
    """Returns the seals of a memory file, None for anything else."""
    import fcntl

    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return None


def close_received(descriptors: Sequence[int]) -> None:
    """Closes what came with a packet, at once if that is one memory file, as it should be."""
    if len(descriptors) == 1 and find_seals(descriptors[0]) is not None:
        os.close(descriptors[0])
    else:
        close_aside(lambda: close_descriptors(descriptors))


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


class Region:
    """Memory file that its sender writes arrays into, as often as it likes; it cannot shrink.

    Its sender does not map it: to write a file is faster than to write memory whose pages the kernel adds one
    by one, and where there is no memory left, a write raises an error and a page ends the process.
    """

    __slots__ = ("descriptor",)

    def __init__(self) -> None:
        self.descriptor = -1
        self.descriptor = create_memory()

    def write(self, arrays: Iterable[NDArray[Any]], places: Places) -> None:
        """Writes arrays in C order and native byte order; raises `OSError` if there is no memory."""
        import numpy as np  # here, since workers import it after ONNX Runtime

        for array, offset in zip(arrays, places.offsets, strict=True):
            plain = np.asarray(array, array.dtype.newbyteorder("="), order="C")
            remaining, position = plain.reshape(-1).view(np.uint8).data, offset
            while remaining:
                count = os.pwrite(self.descriptor, remaining, position)
                remaining, position = remaining[count:], position + count
        if os.fstat(self.descriptor).st_size < places.end:
            os.ftruncate(self.descriptor, places.end)

    def close(self) -> None:
        """Closes the descriptor; who received the file keeps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    __del__ = close
