"""The memory that a pool and a worker's process share: two windows for each lane.

It is a file without a name, sealed against shrinking, whose pages cost nothing until they are written. The
kernel frees it with the last of both processes. No other worker has it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from ortprep.runtime.packets import MAX_ARRAYS_BYTES, Places
from ortprep.runtime.tensors.element_types import Array

LANES = 2
"""Requests that a worker has at once: while one runs, the other travels."""

_SIZE = 2 * LANES * MAX_ARRAYS_BYTES


class Window:
    """Part of the memory, which one side writes arrays into and the other reads.

    Args:
        memory: The whole memory.
        begin: Where this part begins, in bytes; it has `MAX_ARRAYS_BYTES`.
        is_copied: Whether arrays are copied when they are read; otherwise they lie here, and who wrote them
            must not write again while they are in use.
    """

    def __init__(self, memory: mmap.mmap, begin: int, *, is_copied: bool) -> None:
        self._memory, self._begin, self._is_copied = memory, begin, is_copied

    def write(self, arrays: Iterable[Array], places: Places) -> None:
        """Writes arrays in C order and native byte order."""
        for array, offset in zip(arrays, places.offsets, strict=True):
            if array.nbytes:
                self._view(array.dtype.newbyteorder("="), array.shape, offset)[...] = array

    def read(self, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> Array:
        """Returns an array that was written."""
        view = self._view(dtype, shape, offset)
        return view.copy() if self._is_copied else view

    def _view(self, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> Array:
        # Unlike `ndarray`, `frombuffer` keeps the memory mapped for as long as the array is there.
        size_bytes = math.prod(shape) * dtype.itemsize
        content = np.frombuffer(self._memory, np.uint8, size_bytes, self._begin + offset)
        return content.view(dtype).reshape(shape)


class WorkerMemory:
    """The memory, mapped in this process.

    Args:
        descriptor: Of the file; `create` makes one.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _SIZE)

    @staticmethod
    def create() -> int:
        """Returns the descriptor of a new file; raises `OSError` if there is none to be had."""
        descriptor = os.memfd_create("ortprep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _SIZE)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except BaseException:  # an interrupt, too, must leave no file
            os.close(descriptor)
            raise
        return descriptor

    def requests(self, lane: int) -> Window:
        """Returns the window of a lane's requests."""
        return Window(self._memory, 2 * lane * MAX_ARRAYS_BYTES, is_copied=False)

    def answers(self, lane: int) -> Window:
        """Returns the window of a lane's answers, which are copied, since a worker may go wrong."""
        return Window(self._memory, (2 * lane + 1) * MAX_ARRAYS_BYTES, is_copied=True)

    def close(self) -> None:
        """Gives the memory back, once nobody reads it."""
        with suppress(BufferError):  # a thread copies arrays, after which it goes by itself
            self._memory.close()
