"""A pool's memory as its own process sees it: what is in use, and what workers have not been sent yet."""

from __future__ import annotations

import bisect
import os

from ortprep.errors import NoRoomError, PoolError
from ortprep.runtime.pool.memory import (
    PAGE_BYTES,
    Arena,
    MemoryFile,
    ReleaseQueue,
    create_memory,
    size_class,
)
from ortprep.runtime.pool.messages import Span
from ortprep.runtime.tensors.element_types import Array

_SPACE = 4  # of address space, for each byte that may be in use


class PoolMemory:
    """The memory of a pool. Everything but `find` is called with the pool's lock held.

    The file begins with a page per worker, where it writes the number of the request it is at, and the bytes
    that its answers hold. While requests and answers in use take `max_bytes`, no other request is taken.
    """

    def __init__(self, workers: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._region_bytes = -(-max_bytes // PAGE_BYTES) * PAGE_BYTES * _SPACE
        self._begin = workers * PAGE_BYTES
        size = self._begin + (workers + 1) * self._region_bytes
        self.descriptor = create_memory(size)
        self.file = MemoryFile(self.descriptor, size)
        self._arena = Arena(self.file, self.region(-1), max_bytes)
        self.queue = ReleaseQueue(self.file)
        self._answers: list[list[Span]] = [[] for _ in range(workers)]  # in use, by where they begin
        self._released: list[list[int] | None] = [None] * workers  # None while a worker does not run
        self._released_bytes = [0] * workers
        self._trimmed_at = [0] * workers
        self._answers_bytes = 0
        self._is_closed = self.has_grown = False

    def region(self, worker: int) -> Span:
        """Returns the region of a worker's answers; of requests for -1."""
        return Span(self._begin + (worker + 1) * self._region_bytes, self._region_bytes)

    def page(self, worker: int) -> Span:
        """Returns the page where a worker writes its current request."""
        return Span(worker * PAGE_BYTES, PAGE_BYTES)

    def status(self, worker: int) -> tuple[int, int]:
        """Returns the request that a worker began with last, and the bytes that its answers hold."""
        request, held = self.file.bytes[worker * PAGE_BYTES :][:16].view("<u8")
        return int(request), int(held)

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks that are somebody's."""
        return self._arena.used_bytes + self._answers_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, in use or idle."""
        return self._arena.held_bytes + sum(map(self._held_by, range(len(self._answers))))

    def _held_by(self, worker: int) -> int:
        is_running = self._released[worker] is not None
        return self.status(worker)[1] if is_running else self._answers_of(worker)

    def _answers_of(self, worker: int) -> int:
        return sum(block.size for block in self._answers[worker])

    def allocate(self, size: int) -> Span | None:
        """Returns a block for a request, or None while there is no room; an empty block for 0 bytes.

        Raises:
            NoRoomError: There never will be room.
        """
        self.collect()
        block_bytes = size_class(size) if size else 0
        if block_bytes > self.max_bytes:
            raise NoRoomError(
                f"batch does not fit the pool's shared memory\n"
                f"  expected at most {self.max_bytes} bytes, got {block_bytes}",
                hint=f"PoolConfig(max_shared_bytes={2 * block_bytes:d})",
            )
        if self.used_bytes + block_bytes > self.max_bytes:
            return None
        return self._arena.allocate(size) if size else Span()

    def release(self, block: Span) -> None:
        """Takes a block back."""
        if self._is_closed or not block.size:
            return
        worker = (block.offset - self._begin) // self._region_bytes - 1
        if worker < 0:
            self._arena.release(block.offset)
            return
        answers = self._answers[worker]
        del answers[bisect.bisect_left(answers, block)]
        self._answers_bytes -= block.size
        released = self._released[worker]
        if released is None:
            self.file.discard(block)
        else:
            released.append(block.offset)
            self._released_bytes[worker] += block.size

    def collect(self) -> bool:
        """Takes back the blocks whose arrays are gone, and returns whether there were any."""
        has_any = False
        while (block := self.queue.take()) is not None:
            self.release(block)
            has_any = True
        return has_any

    def find(self, array: Array) -> int | None:
        """Returns where in the file an array lies, None if it lies elsewhere."""
        offset: int = array.__array_interface__["data"][0] - self.file.address
        return offset if 0 <= offset <= self.file.size - array.nbytes and not self._is_closed else None

    def claim(self, worker: int, block: Span) -> None:
        """Takes note of an answer's block; raises `PoolError` if the worker has no such block to give."""
        region, end = self.region(worker), block.offset + block.size
        answers = self._answers[worker]
        at = bisect.bisect_left(answers, block)
        is_inside = region.offset <= block.offset and end <= region.offset + region.size
        is_free = (not at or sum(answers[at - 1]) <= block.offset) and (
            at == len(answers) or end <= answers[at].offset
        )
        if not (is_inside and is_free) or block.offset % PAGE_BYTES or block.size % PAGE_BYTES:
            raise PoolError(
                f"answer lies outside of its worker's memory\n  expected free pages in {region}, got {block}"
            )
        answers.insert(at, block)
        self._answers_bytes += block.size
        self.has_grown = True

    def take_released(self, worker: int, *, min_bytes: int = 0) -> list[int]:
        """Returns the blocks that a worker may use again, once; none yet if they are smaller together."""
        if self._released_bytes[worker] < max(min_bytes, 1):
            return []
        released, self._released[worker], self._released_bytes[worker] = self._released[worker], [], 0
        return released or []

    def trim(self) -> list[int]:
        """Gives idle memory back where blocks take too much; returns the workers that are to do so, too."""
        self.has_grown, excess = False, self.held_bytes - self.max_bytes
        if excess <= 0:
            return []
        self._arena.trim(max(0, self._arena.held_bytes - excess))
        workers = []
        for worker in range(len(self._answers)) if self.held_bytes > self.max_bytes else ():
            held = self._held_by(worker)
            if held > self._answers_of(worker) and held != self._trimmed_at[worker]:
                self._trimmed_at[worker] = held
                workers.append(worker)
        return workers

    def begin_worker(self, worker: int) -> tuple[Span, ...]:
        """Takes note of a worker's start, and returns its predecessors' answers that are in use."""
        self._released[worker], self._released_bytes[worker] = [], 0
        self.file.bytes[worker * PAGE_BYTES :][:16] = 0
        return tuple(self._answers[worker])

    def end_worker(self, worker: int) -> None:
        """Gives all memory of a worker that has ended back, but for answers in use."""
        if self._is_closed:
            return
        self._released[worker], self._released_bytes[worker] = None, 0
        begin, size = self.region(worker)
        end = begin + size
        for offset, block_bytes in self._answers[worker]:
            self.file.discard(Span(begin, offset - begin))
            begin = offset + block_bytes
        self.file.discard(Span(begin, end - begin))

    def close(self, *, discards: bool = True) -> None:
        """Gives back what is not in use; a fork of the process, which shares the pages, must not discard any.

        Arrays that are still held stay readable.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.queue.close(discards=discards)
        while discards and (block := self.queue.take()) is not None:
            self.file.discard(block)
        if discards:
            self._arena.trim(0)
            self.file.discard(Span(0, self._begin))
        os.close(self.descriptor)
