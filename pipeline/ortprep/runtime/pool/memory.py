"""The shared memory of a pool: a file without a name (`memfd_create`), which the kernel frees.

The pool's process makes it and seals its size, so that no worker can make a mapping of it invalid. It has a
region for requests, which that process divides into blocks, and one per worker for its answers, which that
worker divides. Regions are larger than what may be in use, since pages that nobody touched cost nothing.
"""

from __future__ import annotations

import bisect
import fcntl
import functools
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortprep.errors import NoRoomError, PoolError
from ortprep.runtime.pool.messages import Layout, Span
from ortprep.runtime.tensors.element_types import Array

PAGE_BYTES = mmap.PAGESIZE
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_STEPS = 8  # size classes per doubling: at most an eighth of a large block is wasted


class MemoryFile:
    """A memory file in this process's address space, until the last array on it is gone.

    Raises:
        PoolError: It is smaller, or there is no address space for it.
    """

    __slots__ = ("_map", "address", "bytes", "size")

    def __init__(self, descriptor: int, size: int) -> None:
        try:
            self._map = mmap.mmap(descriptor, size)
        except (OSError, ValueError) as error:
            hint = "ulimit -v, or a smaller max_shared_bytes"
            raise PoolError(f"cannot map {size} bytes of shared memory\n  {error}", hint=hint) from error
        self.size = size
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address: int = self.bytes.ctypes.data

    def view(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns a tensor, which is read and written where it lies."""
        return np.ndarray(shape, dtype, self.bytes, offset)

    def write(self, block: Span, layout: Layout, arrays: Sequence[Array]) -> None:
        """Copies the tensors of a message to its block."""
        for position in layout.copied:
            array, place = arrays[position], layout.places[position]
            self.view(block.offset + place.offset, array.dtype.newbyteorder("="), array.shape)[...] = array

    def discard(self, span: Span) -> None:
        """Gives pages back to the system; they read as zeros afterwards, in every process."""
        if span.size > 0:
            self._map.madvise(mmap.MADV_REMOVE, *span)


def create_memory(size: int) -> int:
    """Returns the descriptor of a new memory file of a sealed size; raises `PoolError` if there is none."""
    try:
        descriptor = os.memfd_create("ortprep-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise PoolError(f"cannot make shared memory\n  {error.strerror}", hint="ulimit -n") from error
    try:
        os.ftruncate(descriptor, size)
    except (OSError, OverflowError) as error:
        os.close(descriptor)
        hint = "a smaller max_shared_bytes"
        raise PoolError(f"cannot make {size} bytes of shared memory\n  {error}", hint=hint) from error
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
    return descriptor


@functools.lru_cache(1024)
def size_class(size: int) -> int:
    """Returns the size of the blocks for some bytes: whole pages, at most an eighth more for large ones."""
    step = max(1 << (max(size, 1) - 1).bit_length(), PAGE_BYTES) // (2 * _STEPS)
    step = -(-step // PAGE_BYTES) * PAGE_BYTES
    return -(-max(size, 1) // step) * step


class Arena:
    """Divides a region of the file into blocks.

    Blocks in use, some of which may be `taken` already, and idle ones, which keep their pages for the next
    use, take `max_bytes` at most: idle ones give way.
    """

    def __init__(self, memory: MemoryFile, region: Span, max_bytes: int, taken: Iterable[Span] = ()) -> None:
        self._memory, self._max_bytes = memory, max_bytes
        self.used_bytes = self.idle_bytes = 0
        self._used: dict[int, int] = {}
        self._idle: dict[int, list[int]] = {}
        self._gaps = []  # begin and end, in order, no two next to each other
        begin, end = region.offset, region.offset + region.size
        for block in sorted(taken):
            self._take(block)
            if begin < block.offset:
                self._gaps.append((begin, block.offset))
            begin = block.offset + block.size
        self._gaps.append((begin, end))

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, in use or idle."""
        return self.used_bytes + self.idle_bytes

    def allocate(self, size: int) -> Span:
        """Returns a block of at least that size; raises `NoRoomError` if there is no room."""
        block_bytes = size_class(size)
        if idle := self._idle.get(block_bytes):
            self.idle_bytes -= block_bytes
            return self._take(Span(idle.pop(), block_bytes))
        self.trim(self._max_bytes - block_bytes)
        offset = self._cut(block_bytes)
        if offset is None:
            self.trim(0)
            offset = self._cut(block_bytes)
        if offset is None:
            raise NoRoomError(
                f"no shared memory for {block_bytes} bytes\n  got {self.used_bytes} in use",
                hint=f"PoolConfig(max_shared_bytes={self._max_bytes + 2 * block_bytes:d})",
            )
        return self._take(Span(offset, block_bytes))

    def _take(self, block: Span) -> Span:
        self._used[block.offset] = block.size
        self.used_bytes += block.size
        return block

    def release(self, offset: int) -> None:
        """Takes a block back, by where it begins."""
        block_bytes = self._used.pop(offset)
        self.used_bytes -= block_bytes
        self.idle_bytes += block_bytes
        self._idle.setdefault(block_bytes, []).append(offset)
        self.trim(self._max_bytes)  # blocks in use may have taken more

    def trim(self, keep_bytes: int) -> None:
        """Gives pages of idle blocks back until blocks take no more than so many bytes, or none is idle."""
        while self.idle_bytes and self.held_bytes > keep_bytes:
            block_bytes, blocks = next(iter(self._idle.items()))
            if blocks:
                block = Span(blocks.pop(), block_bytes)
                self.idle_bytes -= block_bytes
                self._memory.discard(block)
                self._return(*block)
            else:
                del self._idle[block_bytes]

    def _cut(self, size: int) -> int | None:
        for index, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[index : index + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def _return(self, begin: int, size: int) -> None:
        end, index = begin + size, bisect.bisect(self._gaps, (begin, 0))
        if index < len(self._gaps) and self._gaps[index][0] == end:
            end = self._gaps.pop(index)[1]
        if index and self._gaps[index - 1][1] == begin:
            index -= 1
            begin = self._gaps.pop(index)[0]
        self._gaps.insert(index, (begin, end))


class ReleaseQueue:
    """Where the garbage collector leaves blocks whose arrays are gone; that takes no lock.

    `awaited_by`, which takes no lock either, is called once, when the next block is left. Once the queue is
    closed, pages of blocks go back to the system.
    """

    def __init__(self, memory: MemoryFile) -> None:
        self._memory = memory
        self._blocks: deque[Span] = deque()
        self._is_open = self._discards = True
        self.awaited_by: Callable[[], None] | None = None

    def put(self, block: Span) -> None:
        """Leaves a block."""
        if self._is_open:
            self._blocks.append(block)
            awaited_by, self.awaited_by = self.awaited_by, None
            if awaited_by is not None:
                awaited_by()
        elif self._discards:
            self._memory.discard(block)

    def take(self) -> Span | None:
        """Returns a block that was left, None if there is none."""
        return self._blocks.popleft() if self._blocks else None

    def close(self, *, discards: bool) -> None:
        """Keeps no more blocks, whose pages only the pool's process may discard, and no fork of it."""
        self._is_open, self._discards = False, discards

    def refer(self, block: Span) -> BlockRef:
        """Returns a right to a block."""
        return BlockRef(self._memory, block, self)


class BlockRef:
    """Somebody's right to a block, which ends when this is collected.

    The garbage collector may come at any moment, even to a thread that holds the pool's lock, so all it does
    is leave the block in a queue.
    """

    __slots__ = ("__array_interface__", "_block", "_queue")

    def __init__(self, memory: MemoryFile, block: Span, queue: ReleaseQueue) -> None:
        self._block, self._queue = block, queue
        address = memory.address + block.offset
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (block.size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._queue.put(self._block)

    def view(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns a tensor in the block; all that is cut from it keeps the block in use."""
        return np.ndarray(shape, dtype, np.asarray(self), offset)


def pack_inline(begin: bytes, layout: Layout, arrays: Sequence[Array]) -> bytes:
    """Returns a packet with tensors in it, given its head and places."""
    parts, end = [begin], len(begin)
    for position in layout.copied:
        array, offset = arrays[position], layout.places[position].offset
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        parts += (bytes(offset - end), array.tobytes())
        end = offset + array.nbytes
    return b"".join(parts)
