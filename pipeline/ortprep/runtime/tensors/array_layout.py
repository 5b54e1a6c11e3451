"""Where the arrays of a message lie: one after the other, in its packet or, if they are large, a memory file.

A message carries shapes and no offsets. Sender and receiver compute the same offsets from shapes and item
sizes, so arrays cannot overlap; the receiver checks where they end. Pool and host share this. numpy is
imported when arrays are copied: workers import ONNX Runtime before numpy.
"""

from __future__ import annotations

import math
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

INLINE_BYTES = 16 * 1024
"""Maximum data of arrays that travels in a packet; more lies in shared memory."""

MAX_PACKET_BYTES = 96 * 1024
"""Largest packet, under half of what a socket of Linux holds by default (`net.core.wmem_default`)."""

MAX_RANK = 32
"""Maximum number of axes of an array, as in bundles."""

_MAX_BYTES = 2**62
_ALIGNMENT = 64

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


def create_memory(name: str, size: int) -> int:
    """Returns the descriptor of a new memory file whose size is sealed, so that no mapping becomes invalid.

    Raises:
        OSError: There is no memory or no descriptor.
        OverflowError: No file is so large.
    """
    import fcntl  # here, since small requests do not need it

    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
