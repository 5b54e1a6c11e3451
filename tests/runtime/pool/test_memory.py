"""Blocks of shared memory: whose they are, what they cost, and what nobody can do to them."""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ortprep.errors import NoRoomError, PoolError
from ortprep.runtime.pool.memory import PAGE_BYTES, Arena, MemoryFile, create_memory, size_class
from ortprep.runtime.pool.messages import Span
from ortprep.runtime.pool.pool_memory import PoolMemory

MB = 2**20


def make_file(size: int) -> MemoryFile:
    descriptor = create_memory(size)
    file = MemoryFile(descriptor, size)
    os.close(descriptor)
    return file


def resident(file: MemoryFile) -> int:
    """Bytes of a file that take memory."""
    text = Path("/proc/self/smaps").read_text()
    part = text[text.index(f"{file.address:x}-") :]
    return int(part[part.index("Rss:") :].split()[1]) * 1024


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    found = PoolMemory(2, 8 * MB)
    for worker in range(2):
        found.begin_worker(worker)
    yield found
    found.close()


def test_more_than_a_file_can_have_is_an_error_of_the_pool() -> None:
    with pytest.raises(PoolError, match="cannot make"):
        create_memory(2**64)


def test_a_size_that_was_sealed_cannot_be_changed() -> None:
    descriptor = create_memory(4 * PAGE_BYTES)
    for size in (0, PAGE_BYTES, 8 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)


@given(st.integers(1, 2**40))
def test_a_block_is_large_enough_and_little_larger(size: int) -> None:
    block = size_class(size)
    assert block >= size
    assert block % PAGE_BYTES == 0
    assert block <= max(size * 9 / 8 + PAGE_BYTES, PAGE_BYTES)
    assert size_class(block) == block


@given(st.lists(st.one_of(st.integers(1, 3_000_000), st.integers(-20, -1)), max_size=60))
@example([1, 2_359_297, 2_359_297, -1])
def test_blocks_never_overlap_and_stay_in_their_region(steps: list[int]) -> None:
    file = make_file(32 * MB)
    taken = [Span(8 * MB, MB), Span(12 * MB, 2 * MB)]
    arena = Arena(file, Span(8 * MB, 16 * MB), 8 * MB, taken)
    held = list(taken)
    for step in steps:
        if step > 0:
            try:
                held.append(arena.allocate(step))
            except NoRoomError:
                assert sum(block.size for block in held) + size_class(step) > 8 * MB
        elif held:
            arena.release(held.pop(step % len(held)).offset)
        spans = sorted(held)
        assert all(one.offset + one.size <= other.offset for one, other in itertools.pairwise(spans))
        assert all(one.offset >= 8 * MB and one.offset + one.size <= 24 * MB for one in spans)
        assert arena.used_bytes == sum(block.size for block in held)
        assert arena.used_bytes + arena.idle_bytes <= max(8 * MB, arena.used_bytes)
    for block in held:
        arena.release(block.offset)
    arena.trim(0)
    whole = arena.allocate(16 * MB)
    assert whole == Span(8 * MB, 16 * MB)  # the gaps have grown together


def test_idle_blocks_give_their_pages_back_when_told() -> None:
    file = make_file(64 * MB)
    arena = Arena(file, Span(0, 64 * MB), 16 * MB)
    blocks = [arena.allocate(2 * MB) for _ in range(4)]
    for block in blocks:
        file.bytes[block.offset : block.offset + block.size] = 1
    assert resident(file) == 8 * MB
    for block in blocks[1:]:
        arena.release(block.offset)
    assert resident(file) == 8 * MB
    arena.trim(4 * MB)
    assert resident(file) == 4 * MB
    arena.trim(0)
    assert resident(file) == 2 * MB
    assert file.bytes[blocks[0].offset] == 1


def test_a_block_goes_back_when_the_last_array_on_it_is_gone(memory: PoolMemory) -> None:
    block = memory.allocate(MB)
    assert block is not None
    array = memory.queue.refer(block).view(0, np.dtype(np.float32), (256, 1024))
    array[...] = 3
    part = array[5:7, ::2]
    assert memory.find(array) == block.offset
    del array
    gc.collect()
    assert not memory.collect()
    assert (part == 3).all()
    del part
    gc.collect()
    assert memory.collect()
    assert memory.used_bytes == 0


def test_bytes_of_others_are_not_found(memory: PoolMemory) -> None:
    assert memory.find(np.ones(100_000)) is None
    edge = np.ndarray(2 * PAGE_BYTES, np.uint8, memory.file.bytes[-2 * PAGE_BYTES :])
    assert memory.find(edge) == memory.file.size - 2 * PAGE_BYTES


def test_requests_and_answers_share_a_bound(memory: PoolMemory) -> None:
    region = memory.region(0)
    block = memory.allocate(4 * MB)
    assert block is not None
    memory.claim(0, Span(region.offset, 4 * MB))
    assert memory.allocate(1) is None
    memory.release(Span(region.offset, 4 * MB))
    assert memory.take_released(0, min_bytes=5 * MB) == []
    assert memory.take_released(0, min_bytes=4 * MB) == [region.offset]
    assert memory.take_released(0) == []
    other = memory.allocate(4 * MB)
    assert other is not None
    for one in (block, other):
        memory.release(one)
    assert memory.used_bytes == 0
    with pytest.raises(NoRoomError, match="does not fit"):
        memory.allocate(9 * MB)


def test_even_a_small_request_waits_where_answers_have_taken_more_than_all(memory: PoolMemory) -> None:
    region = memory.region(0)
    memory.claim(0, Span(region.offset, 8 * MB))
    assert memory.allocate(0) == Span()
    memory.claim(0, Span(region.offset + 8 * MB, PAGE_BYTES))
    assert memory.allocate(0) is None


@pytest.mark.parametrize("shift", [-PAGE_BYTES, 10**9])
def test_a_worker_gives_blocks_of_its_own_region_once(memory: PoolMemory, shift: int) -> None:
    region = memory.region(1)
    memory.claim(1, Span(region.offset, PAGE_BYTES))
    memory.claim(1, Span(region.offset + 4 * PAGE_BYTES, 2 * PAGE_BYTES))
    for wrong in (
        Span(region.offset, PAGE_BYTES),
        Span(region.offset, 2 * PAGE_BYTES),
        Span(region.offset + 3 * PAGE_BYTES, 2 * PAGE_BYTES),
        Span(region.offset + 3 * PAGE_BYTES, 4 * PAGE_BYTES),
        Span(region.offset + 5 * PAGE_BYTES, PAGE_BYTES),
        Span(region.offset + shift, PAGE_BYTES),
        Span(region.offset + region.size - PAGE_BYTES, 2 * PAGE_BYTES),
        Span(region.offset + PAGE_BYTES, 2**63),
        Span(region.offset + PAGE_BYTES + 64, PAGE_BYTES),
        Span(region.offset + PAGE_BYTES, PAGE_BYTES + 64),
    ):
        with pytest.raises(PoolError, match="outside"):
            memory.claim(1, wrong)
    assert memory.used_bytes == 3 * PAGE_BYTES
    memory.claim(1, Span(region.offset + PAGE_BYTES, 3 * PAGE_BYTES))
    memory.release(Span(region.offset + 4 * PAGE_BYTES, 2 * PAGE_BYTES))
    memory.claim(1, Span(region.offset + 5 * PAGE_BYTES, PAGE_BYTES))


def test_of_a_worker_that_has_ended_only_answers_in_use_stay(memory: PoolMemory) -> None:
    region = memory.region(0)
    blocks = [Span(region.offset + n * MB, MB) for n in range(4)]
    for n, block in enumerate(blocks):
        memory.file.bytes[block.offset : block.offset + block.size] = n + 1
        memory.claim(0, block)
    memory.release(blocks[1])
    memory.end_worker(0)
    assert resident(memory.file) == 3 * MB + PAGE_BYTES * 2
    memory.release(blocks[3])
    assert resident(memory.file) == 2 * MB + PAGE_BYTES * 2
    assert memory.begin_worker(0) == (blocks[0], blocks[2])
    successor = Arena(memory.file, region, 8 * MB, memory.begin_worker(0))
    got = [successor.allocate(MB) for _ in range(6)]
    assert not {blocks[0], blocks[2]}.intersection(got)
    assert [int(memory.file.bytes[block.offset]) for block in (blocks[0], blocks[2])] == [1, 3]
    memory.release(blocks[2])
    assert memory.take_released(0) == [blocks[2].offset]


def test_workers_that_hold_too_much_are_told_once(memory: PoolMemory) -> None:
    memory.file.bytes[PAGE_BYTES + 8 : PAGE_BYTES + 16].view("<u8")[0] = 20 * MB
    assert memory.trim() == [1]
    assert memory.trim() == []
    memory.file.bytes[PAGE_BYTES + 8 : PAGE_BYTES + 16].view("<u8")[0] = 21 * MB
    assert memory.trim() == [1]


def test_after_close_arrays_stay_readable_and_then_their_pages_go() -> None:
    memory = PoolMemory(1, 8 * MB)
    kept, dropped = (memory.allocate(MB) for _ in range(2))
    assert kept is not None
    assert dropped is not None
    arrays = [memory.queue.refer(block).view(0, np.dtype(np.uint8), (MB,)) for block in (kept, dropped)]
    for array in arrays:
        array[...] = 7
    del array
    memory.close()
    arrays.pop()
    gc.collect()
    assert resident(memory.file) == MB
    assert (arrays[0] == 7).all()
