"""The shared memory of a pool: a memory file, divided into regions.

The pool's process makes it and seals its size, so that no worker can make a mapping of it invalid. A region
is the memory of a slot, for its inputs and its outputs. Regions are as large as the largest request with its
answer may be, and never move: pages that nobody touched cost nothing, and those of a free region are kept for
the next slot as long as all together take no more than the pool may.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass

from ortprep.errors import NoRoomError, PoolError
from ortprep.runtime.ipc import MemoryFile

PAGE_BYTES = mmap.PAGESIZE
MAX_REGION_BYTES = 2**36
"""Largest request with its answer: 64 GiB, which bounds the address space that a pool reserves."""


@dataclass(slots=True, eq=False)
class Region:
    """A part of the file.

    Attributes:
        begin: Where it begins.
        size: Bytes in use for inputs, whole pages; 0 while it is free or for an answer only.
        kept: Bytes at its beginning that may take memory.
        is_for_answer: Whether it was taken for an answer only.
    """

    begin: int
    size: int = 0
    kept: int = 0
    is_for_answer: bool = False


class RegionTable:
    """Which regions are in use; all is called with the pool's lock held.

    Args:
        count: How many regions there are for requests; as many more are for answers to small requests.
        max_bytes: Maximum bytes of requests before `has_room` refuses more.

    Attributes:
        region_bytes: Maximum bytes of a request with its answer.
        used_bytes: Bytes of requests in regions.
        held_bytes: Bytes that may take memory, kept ones included, and answers once they are read.
    """

    def __init__(self, count: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._largest = min(max_bytes, MAX_REGION_BYTES)
        self.region_bytes = _whole_pages(self._largest)
        size = 2 * count * self.region_bytes
        try:
            self.file = MemoryFile(size)
        except (OSError, ValueError, OverflowError) as error:
            hint = "ulimit -n; ulimit -v   (or a smaller max_shared_bytes)"
            raise PoolError(f"cannot make {size} bytes of shared memory\n  {error}", hint=hint) from error
        self.used_bytes = self.held_bytes = 0
        self._left = count
        self._regions = [Region(number * self.region_bytes) for number in reversed(range(2 * count))]
        self._free = list(self._regions)
        self._is_open = self._discards = True

    def require_room(self, size: int) -> None:
        """Raises `NoRoomError` if there never will be room for so many bytes."""
        if size > self._largest:
            raise NoRoomError(
                f"batch does not fit the pool's shared memory\n"
                f"  expected at most {self._largest} bytes, got {size}",
                hint=f"PoolConfig(max_shared_bytes={2 * size:d})",
            )

    def has_room(self, size: int) -> bool:
        """Returns whether `take` can return a region for a request of so many bytes now."""
        limit = max(self.max_bytes, self.region_bytes)
        return self._left > 0 and self.has_free and self.used_bytes + _whole_pages(size) <= limit

    @property
    def has_free(self) -> bool:
        """Whether any region is free."""
        return bool(self._free)

    def take(self, size: int) -> Region:
        """Returns a free region, the one that was in use last, for a request of so many bytes.

        0 is for the answer to a request that needs none.
        """
        region = self._free.pop()
        region.is_for_answer, region.size = not size, _whole_pages(size)
        self._left -= bool(size)
        self.used_bytes += region.size
        self.note_written(region, size)
        return region

    def note_written(self, region: Region, size: int) -> None:
        """Notes how many bytes of a region may have been written."""
        grown = max(0, _whole_pages(size) - region.kept)
        region.kept += grown
        self.held_bytes += grown
        self._trim()

    def release(self, region: Region) -> None:
        """Takes a region back."""
        self.used_bytes -= region.size
        self._left += not region.is_for_answer
        region.size = 0
        self._free.append(region)
        if self._is_open:
            self._trim()
        elif self._discards:
            self._discard(region.begin, region.kept)

    def _discard(self, begin: int, size: int) -> None:
        """Gives pages back to the system; they read as zeros afterwards, in every process."""
        if size:
            self.file.memory.madvise(mmap.MADV_REMOVE, begin, size)

    def _trim(self) -> None:
        """Gives pages of free regions back, of the longest idle first, while they take too much."""
        for region in self._free if self.held_bytes > self.max_bytes else ():
            self._discard(region.begin, region.kept)
            self.held_bytes -= region.kept
            region.kept = 0
            if self.held_bytes <= self.max_bytes:
                return

    def scrub(self, lost: Iterable[Region]) -> None:
        """Gives back what a worker that went wrong may have written beyond what is noted.

        Args:
            lost: Regions that it had. Free ones are looked at too; not those of other workers, since answers
                that nobody has read lie there.
        """
        for region in (*self._free, *lost):
            self._discard(region.begin + region.kept, self.region_bytes - region.kept)

    def close(self, *, discards: bool = True) -> None:
        """Gives everything back; a fork of the process, which shares the pages, discards none."""
        if not self._is_open:
            return
        self._is_open, self._discards = False, discards
        self.file.close()
        for region in self._free if discards else ():
            self._discard(region.begin, region.kept)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
