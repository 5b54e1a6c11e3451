"""The memory that a pool and a worker's process share: what the worker is at, and two windows for each lane.

It is a file without a name, sealed against shrinking, whose pages cost nothing until they are written. The
kernel frees it with the last of both processes. No other worker has it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from ortprep.runtime.packets import MAX_ARRAYS_BYTES, Places
from ortprep.runtime.tensors.element_types import Array

LANES = 2
"""Requests that a worker has at once: while one runs, the other travels."""

_SENT = 1
_SIZE = mmap.PAGESIZE + 2 * LANES * MAX_ARRAYS_BYTES


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

    The pool marks a lane before it sends a request, the worker when it runs it and when it is done. So after
    a worker's end the pool knows which request it was at.

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
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def requests(self, lane: int) -> Window:
        """Returns the window of a lane's requests."""
        return Window(self._memory, mmap.PAGESIZE + 2 * lane * MAX_ARRAYS_BYTES, is_copied=False)

    def answers(self, lane: int) -> Window:
        """Returns the window of a lane's answers, which are copied, since a worker may go wrong."""
        return Window(self._memory, mmap.PAGESIZE + (2 * lane + 1) * MAX_ARRAYS_BYTES, is_copied=True)

    def mark_sent(self, lane: int) -> None:
        """Marks a request as sent."""
        self._mark(lane, _SENT)

    def mark_begun(self, lane: int) -> None:
        """Marks a request as running from now on."""
        self._mark(lane, time.monotonic_ns())

    def mark_done(self, lane: int) -> None:
        """Marks a request as run."""
        self._mark(lane, 0)

    def _mark(self, lane: int, value: int) -> None:
        self._memory[8 * lane : 8 * lane + 8] = value.to_bytes(8, "little")

    def _read_mark(self, lane: int) -> int:
        return int.from_bytes(self._memory[8 * lane : 8 * lane + 8], "little")

    def running_since(self, lane: int) -> float:
        """Returns when a run began, by `time.monotonic()`; infinite if none runs, or the worker has ended."""
        try:
            mark = self._read_mark(lane)
        except ValueError:  # closed
            return math.inf
        return mark / 1e9 if mark > _SENT else math.inf

    @property
    def is_busy(self) -> bool:
        """Whether a request runs, of any lane."""
        return any(self.running_since(lane) < math.inf for lane in range(LANES))

    def find_blame(self) -> tuple[bool, ...]:
        """Returns for each lane whether a worker that has ended was at its request, or about to begin it.

        Where two were begun, the first one failed, and the second had its turn while the process ended.
        """
        marks = [self._read_mark(lane) for lane in range(LANES)]
        begun = min([mark for mark in marks if mark > _SENT], default=_SENT)
        return tuple([mark == begun for mark in marks])

    def close(self) -> None:
        """Gives the memory back, once nobody reads it."""
        with suppress(BufferError):  # a thread copies arrays, after which it goes by itself
            self._memory.close()
