"""Blocks of shared memory: which are taken, which can be had again, which must go to make room.

Small blocks are cut from segments of one size class, large ones have a segment each. Everything here is
called with the pool's lock held, but for what the garbage collector does: it only leaves a note.
"""

from __future__ import annotations

import bisect
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PoolError
from pipeline.runtime.pool.wire import Span

_SMALLEST = 4096
_LARGEST_IN_SLAB = 256 * 1024
_SLAB_BYTES = 2**20
_STEPS = 8  # size classes per doubling: at most an eighth of a block is wasted


class NoRoomError(PoolError):
    """The arena, or the system, has no room for a block now."""


class Notes:
    """Where the garbage collector leaves blocks whose arrays are gone; that takes no lock.

    Attributes:
        awaited_by: Called, once, when the next block is left; takes no lock either.
    """

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()
        self._is_open = True
        self.awaited_by: Callable[[], None] | None = None

    def leave(self, block: Block) -> None:
        """Leaves a block to be taken back."""
        if not self._is_open:
            return
        self._blocks.append(block)
        awaited_by, self.awaited_by = self.awaited_by, None
        if awaited_by is not None:
            awaited_by()

    def take(self) -> Block | None:
        """Returns a block that was left, None if there is none."""
        return self._blocks.popleft() if self._blocks else None

    def close(self) -> None:
        """Forgets what was left, and all that will be: nobody takes anything back any more."""
        self._is_open = False
        self._blocks.clear()


class Segment(Protocol):
    """A piece of shared memory that this process made.

    Attributes:
        size: In bytes.
        bytes: All of it; valid as long as the segment is referred to.
        address: Where this process has it mapped.
    """

    size: int
    bytes: NDArray[np.uint8]
    address: int

    def unlink(self) -> None:
        """Removes its name; mappings stay until the last goes."""


class Block(NamedTuple):
    """A piece of a segment that is somebody's.

    Attributes:
        span: Where it is; its size is that of its class.
        segment: What it is cut from, which lives as long as this does.
    """

    span: Span
    segment: Segment

    @property
    def address(self) -> int:
        """Of its first byte in this process."""
        return self.segment.address + self.span.offset

    def part(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Returns some of its bytes, for as long as the block is held; offsets count from the segment's."""
        return self.segment.bytes[offset : offset + size]


@dataclass
class _Entry:
    segment: Segment
    block_bytes: int
    used: int = 0


@dataclass
class ArenaUse:
    """How much shared memory there is, in bytes.

    Attributes:
        segments: How many segments.
        held_bytes: Of all segments.
        used_bytes: Of the blocks that are somebody's.
    """

    segments: int
    held_bytes: int
    used_bytes: int


@functools.lru_cache(1024)
def size_class(size: int) -> int:
    """Returns the size of the blocks that serve a request of some size: at most an eighth larger, or 4096."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = max(1 << ((size - 1).bit_length() - 1), _SMALLEST) // _STEPS
    step = -(-step // 64) * 64
    return -(-size // step) * step


@dataclass
class Arena:
    """The shared memory of a pool.

    Args:
        create: Makes a segment of a number and a size; raises `OSError` where there is no room.
        max_bytes: Most that all segments may take together.
    """

    create: Callable[[int, int], Segment]
    max_bytes: int
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _free: dict[int, list[Block]] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    _addresses: list[int] = field(default_factory=list)
    _numbers: list[int] = field(default_factory=list)
    _held: int = 0
    _used: int = 0
    _last: int = 0
    _removed: list[int] = field(default_factory=list)
    _is_closed: bool = False

    def allocate(self, size: int) -> Block | None:
        """Returns a block of at least that size, or None while there is no room.

        Raises:
            PoolError: There never will be: it is more than the arena may hold.
            NoRoomError: The system has no room, though the arena may hold more.
        """
        wanted = size_class(size)
        self.collect()
        free = self._free.get(wanted)
        if not free:
            if not self._grow(wanted):
                return None
            free = self._free[wanted]
        block = free.pop()
        self._entries[block.span.segment].used += 1
        self._used += wanted
        return block

    def release(self, block: Block) -> None:
        """Takes a block back."""
        entry = self._entries.get(block.span.segment)
        if entry is None or self._is_closed:
            return
        entry.used -= 1
        self._used -= block.span.size
        self._free.setdefault(block.span.size, []).append(block)

    def collect(self) -> bool:
        """Takes back the blocks whose arrays are gone, and says whether there were any."""
        found = False
        while (block := self.notes.take()) is not None:
            self.release(block)
            found = True
        return found

    def find(self, address: int, size: int) -> Span | None:
        """Returns where in the arena some bytes of this process lie, None if they are elsewhere."""
        index = bisect.bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        start, number = self._addresses[index], self._numbers[index]
        inside = address + size <= start + self._entries[number].segment.size
        return Span(number, address - start, size) if inside else None

    @property
    def has_removed(self) -> bool:
        """Whether there are segments that were removed and not yet told of."""
        return bool(self._removed)

    def take_removed(self) -> list[int]:
        """Returns the numbers of segments that were removed since this was last asked."""
        removed, self._removed = self._removed, []
        return removed

    @property
    def use(self) -> ArenaUse:
        """How much there is of it."""
        return ArenaUse(len(self._entries), self._held, self._used)

    def close(self) -> None:
        """Removes every segment's name. Arrays that are still held stay readable."""
        self._is_closed = True
        self.notes.close()
        for entry in self._entries.values():
            entry.segment.unlink()
        self._entries.clear()
        self._free.clear()
        self._addresses.clear()
        self._numbers.clear()
        self._held = self._used = 0

    def _grow(self, block_bytes: int) -> bool:
        if self._is_closed:
            raise PoolError("pool is closed")
        size = max(_SLAB_BYTES // block_bytes, 1) * block_bytes
        size = block_bytes if block_bytes > _LARGEST_IN_SLAB else size
        if block_bytes > self.max_bytes:
            raise PoolError(
                f"batch does not fit the pool's shared memory\n"
                f"  expected at most {self.max_bytes} bytes, got {block_bytes}",
                hint=f"SessionPool(…, max_shared_bytes={2 * block_bytes})",
            )
        if size > self.max_bytes - self._held:
            size = block_bytes
        self._evict(until=self.max_bytes - size)
        if self._held + size > self.max_bytes:
            return False
        self._add(size, block_bytes)
        return True

    def _add(self, size: int, block_bytes: int) -> None:
        number = self._last = self._last + 1
        try:
            segment = self.create(number, size)
        except OSError:
            self._evict(until=0)
            segment = self._create_or_explain(number, size)
        self._entries[number] = _Entry(segment, block_bytes)
        place = bisect.bisect(self._addresses, segment.address)
        self._addresses.insert(place, segment.address)
        self._numbers.insert(place, number)
        self._held += size
        free = self._free.setdefault(block_bytes, [])
        for offset in range(0, size - block_bytes + 1, block_bytes):
            free.append(Block(Span(number, offset, block_bytes), segment))

    def _create_or_explain(self, number: int, size: int) -> Segment:
        try:
            return self.create(number, size)
        except OSError as error:
            hint = "df -h /dev/shm  (in a container: docker run --shm-size=8g …)"
            raise NoRoomError(
                f"no room for {size} bytes of shared memory\n  {error.strerror or error}", hint=hint
            ) from error

    def _evict(self, *, until: int) -> None:
        """Removes unused segments, the oldest first, until no more than so many bytes are held."""
        for number, entry in list(self._entries.items()):
            if self._held <= until:
                return
            if entry.used == 0:
                self._remove(number, entry)

    def _remove(self, number: int, entry: _Entry) -> None:
        del self._entries[number]
        index = self._numbers.index(number)
        del self._addresses[index], self._numbers[index]
        free = self._free[entry.block_bytes]
        free[:] = [block for block in free if block.span.segment != number]
        self._held -= entry.segment.size
        entry.segment.unlink()
        self._removed.append(number)
