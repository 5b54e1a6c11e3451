"""The shared memory of a pool: a file without a name (`memfd_create`), divided into regions.

The pool's process makes it and seals its size, so that no worker can make a mapping of it invalid. A region
is the memory of a slot, for its inputs and its outputs, or of an array from `empty`. Regions are as large as
the largest request may be, and never move: pages that nobody touched cost nothing, and those of a free region
are kept for the next slot as long as all together take no more than the pool may.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ortprep.errors import NoRoomError, PoolError
from ortprep.runtime.pool.messages import Layout
from ortprep.runtime.tensors.element_types import Array

PAGE_BYTES = mmap.PAGESIZE
MAX_REGION_BYTES = 2**36
"""Largest request with its answer: 64 GiB, which bounds the address space that a pool reserves."""

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


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

    def write(self, begin: int, layout: Layout, arrays: Sequence[Array]) -> None:
        """Copies the tensors of a message to where its places count from."""
        for position in layout.copied:
            array, place = arrays[position], layout.places[position]
            self.view(begin + place.offset, array.dtype.newbyteorder("="), array.shape)[...] = array

    def copy(self, source: int, target: int, size: int) -> None:
        """Copies bytes from one place to another."""
        self.bytes[target : target + size] = self.bytes[source : source + size]

    def discard(self, begin: int, size: int) -> None:
        """Gives pages back to the system; they read as zeros afterwards, in every process."""
        if size:
            self._map.madvise(mmap.MADV_REMOVE, begin, size)


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


@dataclass(slots=True, eq=False)
class Region:
    """A part of the file.

    Attributes:
        begin: Where it begins.
        size: Bytes in use, whole pages; 0 while it is free.
        kept: Bytes at its beginning that may take memory.
    """

    begin: int
    size: int = 0
    kept: int = 0


class RegionTable:
    """Which regions are in use; everything but `find` and references is called with the pool's lock held.

    Args:
        count: How many regions there are.
        reserved: How many of them only `grow` takes, so that it always finds one.
        max_bytes: Maximum bytes in use before `take` refuses more.

    Attributes:
        largest: Maximum bytes of a request or an array.
        used_bytes: Bytes of regions in use.
        held_bytes: Bytes that may take memory, kept ones included.
    """

    def __init__(self, count: int, reserved: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.largest = min(max_bytes, MAX_REGION_BYTES)
        self.region_bytes = _whole_pages(self.largest)
        self.descriptor = create_memory(count * self.region_bytes)
        try:
            self.file = MemoryFile(self.descriptor, count * self.region_bytes)
        except PoolError:
            os.close(self.descriptor)
            raise
        self.used_bytes = self.held_bytes = 0
        self._reserved = reserved
        self._regions = [Region(number * self.region_bytes) for number in reversed(range(count))]
        self._free = list(self._regions)
        self._lent: list[tuple[weakref.ref[ArrayMemory], Region]] = []
        self._is_open = self._discards = True

    def require_room(self, size: int) -> None:
        """Raises `NoRoomError` if there never will be room for so many bytes."""
        if size > self.largest:
            raise NoRoomError(
                f"batch does not fit the pool's shared memory\n"
                f"  expected at most {self.largest} bytes, got {size}",
                hint=f"PoolConfig(max_shared_bytes={2 * size:d})",
            )

    def has_room(self, size: int) -> bool:
        """Returns whether `take` can return a region now; for 0 bytes, whether less than all is in use."""
        if not size:
            return self.used_bytes <= self.max_bytes
        return (
            self.used_bytes + _whole_pages(size) <= max(self.max_bytes, self.region_bytes)
            and len(self._free) > self._reserved
        )

    @property
    def is_exhausted(self) -> bool:
        """Whether every region is in use, those for `grow` included."""
        return not self._free

    def take(self, size: int) -> Region:
        """Returns a free region for so many bytes, the one that was in use last."""
        region = self._free.pop()
        self._use(region, size)
        return region

    def grow(self, region: Region | None, size: int) -> Region:
        """Returns a slot's region with more bytes, whatever else is in use; a new one if it had none."""
        grown = region or self._free.pop()
        self.used_bytes -= grown.size
        self._use(grown, size)
        return grown

    def _use(self, region: Region, size: int) -> None:
        region.size = _whole_pages(size)
        self.used_bytes += region.size
        self.held_bytes += max(0, region.size - region.kept)
        region.kept = max(region.kept, region.size)
        self._trim()

    def release(self, region: Region) -> None:
        """Takes a region back."""
        self.used_bytes -= region.size
        region.size = 0
        self._free.append(region)
        if self._is_open:
            self._trim()
        elif self._discards:
            self.file.discard(region.begin, region.kept)

    def _trim(self) -> None:
        """Gives pages of free regions back, of the longest idle first, while they take too much."""
        for region in self._free if self.held_bytes > self.max_bytes else ():
            self.file.discard(region.begin, region.kept)
            self.held_bytes -= region.kept
            region.kept = 0
            if self.held_bytes <= self.max_bytes:
                return

    def scrub(self) -> None:
        """Gives back what a worker that went wrong may have written where no request let it."""
        for region in self._regions:
            self.file.discard(region.begin + region.kept, self.region_bytes - region.kept)

    @property
    def has_lent(self) -> bool:
        """Whether arrays have regions."""
        return bool(self._lent)

    def lend(self, region: Region) -> ArrayMemory:
        """Returns a region as memory of arrays, which is theirs until the last of them is gone."""
        memory = ArrayMemory(self.file, region)
        self._lent.append((weakref.ref(memory), region))
        return memory

    def collect(self) -> bool:
        """Takes back the regions whose arrays are gone, and returns whether there were any."""
        gone = [entry for entry in self._lent if entry[0]() is None and self._is_open]
        for entry in gone:
            self._lent.remove(entry)
            self.release(entry[1])
        return bool(gone)

    def find(self, array: Array) -> int | None:
        """Returns where in the file an array lies, None if it lies elsewhere."""
        offset: int = array.__array_interface__["data"][0] - self.file.address
        return offset if 0 <= offset <= self.file.size - array.nbytes and self._is_open else None

    def close(self, *, discards: bool = True) -> None:
        """Gives back what no array is on; a fork of the process, which shares the pages, discards none.

        Arrays that are still held stay readable; their pages go back when they are gone.
        """
        if not self._is_open:
            return
        if discards:
            self.collect()
        self._is_open, self._discards = False, discards
        os.close(self.descriptor)
        if not discards:
            return
        for region in self._free:
            self.file.discard(region.begin, region.kept)
        for reference, region in self._lent:
            memory = reference()
            if memory is not None:
                weakref.finalize(memory, self.file.discard, region.begin, region.kept).atexit = False


class ArrayMemory:
    """A region that arrays lie in, for as long as any of them is held."""

    __slots__ = ("__array_interface__", "__weakref__", "_file")

    def __init__(self, file: MemoryFile, region: Region) -> None:
        self._file = file  # which its arrays keep alive
        self.__array_interface__ = {
            "data": (file.address + region.begin, False),
            "shape": (region.size,),
            "typestr": "|u1",
            "version": 3,
        }

    def view(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Returns a tensor at the region's beginning; all that is cut from it keeps the region in use."""
        return np.ndarray(shape, dtype, np.asarray(self))


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


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
