"""What pool and host share: where arrays of a message lie, memory files, and descriptors of other processes.

Arrays lie one after the other, in the packet or, if they are large, in a memory file. A message carries
shapes and no offsets. Sender and receiver compute the same offsets from shapes and item sizes, so arrays
cannot overlap; the receiver checks where they end. numpy is imported when arrays are copied: workers import
ONNX Runtime before numpy.

To close a descriptor that another process sent can take as long as that process likes. A socket may linger,
a file system that a program serves (FUSE) may not answer, a terminal may have to drain. The kernel, too,
closes: what `recvmsg` has no room for, and what is still in the queue of a socket that is closed. So who
receives packets of others makes room for all, and closes on a thread of its own.
"""

from __future__ import annotations

import _socket
import _thread
import contextlib
import math
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

INLINE_BYTES = 16 * 1024
"""Maximum data of arrays that travels in a packet; more lies in shared memory."""

MAX_PACKET_BYTES = 96 * 1024
"""Largest packet, under half of what a socket of Linux holds by default (`net.core.wmem_default`)."""

MAX_RANK = 32
"""Maximum number of axes of an array, as in bundles."""

ANCILLARY_BYTES = _socket.CMSG_SPACE(4 * 253)
"""Bytes of ancillary data that hold all descriptors which Linux sends with one packet (`SCM_MAX_FD`)."""

_MAX_BYTES = 2**62
_ALIGNMENT = 64
_MAX_WAIT_S = 0.2
_NO_LINGERING = struct.pack("ii", 1, 0)

Shape = tuple[int, ...]


class Places(NamedTuple):
    """Where arrays lie.

    Attributes:
        offsets: Offset of each array, in bytes, a multiple of 64.
        end: End of the last one, in bytes, rounded up to a multiple of 64.
    """

    offsets: tuple[int, ...]
    end: int

    @property
    def is_inline(self) -> bool:
        """Whether the arrays are small enough to travel in the packet."""
        return self.end <= INLINE_BYTES


def align(size: int) -> int:
    """Returns a number of bytes, rounded up to a multiple of 64."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def place_arrays(sizes: Iterable[int]) -> Places:
    """Returns where arrays of some sizes, in bytes, lie."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += align(size)
    return Places(tuple(offsets), end)


def encode_shape(shape: Shape) -> bytes:
    """Returns a shape as bytes."""
    return struct.pack(f"<B{len(shape)}Q", len(shape), *shape)


def decode_shape(text: bytes, position: int, itemsize: int) -> tuple[Shape, int]:
    """Returns a shape that begins at a position, and where it ends.

    Raises:
        struct.error: It is cut short.
        ValueError: No array of this item size has it.
    """
    (rank,) = struct.unpack_from("<B", text, position)
    if rank > MAX_RANK:
        raise ValueError(f"expected at most {MAX_RANK} axes, got {rank}")
    shape = struct.unpack_from(f"<{rank}Q", text, position + 1)
    if max((math.prod(shape) * itemsize, *shape)) >= _MAX_BYTES:
        raise ValueError(f"no array has shape {list(shape)}")
    return shape, position + 1 + 8 * rank


def copy_arrays(arrays: Iterable[NDArray[Any]], offsets: Sequence[int], memory: Any, begin: int = 0) -> None:
    """Copies arrays into a writable buffer, in C order and native byte order.

    Args:
        arrays: Arrays of any order, strides and byte order.
        offsets: Offset of each, as `place_arrays` returns it.
        memory: The buffer.
        begin: Where offsets count from.
    """
    import numpy as np

    for array, offset in zip(arrays, offsets, strict=True):
        if array.nbytes:
            np.ndarray(array.shape, array.dtype.newbyteorder("="), memory, begin + offset)[...] = array


class MemoryFile:
    """A memory file in this process's address space, until the last array on it is gone.

    Its size is sealed, so that no mapping of it can become invalid.

    Args:
        size: Bytes of the file.
        descriptor: Of one that another process made; None makes one, whose descriptor this closes at its end.

    Raises:
        OSError: There is no memory, address space or descriptor to be had.
        ValueError: The file is smaller.
        OverflowError: No file is so large.
    """

    __slots__ = ("_is_own", "descriptor", "memory")

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self._is_own = False
        import mmap  # here, since small requests do not need it

        self.descriptor = _create_memory(size) if descriptor is None else descriptor
        self._is_own = descriptor is None
        self.memory = mmap.mmap(self.descriptor, size)

    def close(self) -> None:
        """Closes the descriptor, if this made it; the memory stays mapped."""
        if self._is_own:
            self._is_own = False
            os.close(self.descriptor)

    __del__ = close


def _create_memory(size: int) -> int:
    """Returns the descriptor of a new memory file of a sealed size; raises as `MemoryFile`."""
    import fcntl

    descriptor = os.memfd_create("ortprep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
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
