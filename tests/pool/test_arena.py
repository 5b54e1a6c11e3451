from __future__ import annotations

import errno
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import PoolError
from pipeline.runtime.pool.arena import Arena, Block, Segment, size_class

_ADDRESSES = itertools.count(2**40, 2**34)


@dataclass
class PlainSegment:
    size: int
    bytes: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    address: int = field(default_factory=lambda: next(_ADDRESSES))
    is_linked: bool = True

    def unlink(self) -> None:
        assert self.is_linked
        self.is_linked = False


@dataclass
class System:
    """What segments come from: so much room, and no more."""

    room: int = 2**62
    segments: list[PlainSegment] = field(default_factory=list)

    def create(self, number: int, size: int) -> Segment:
        if self.held + size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.segments.append(PlainSegment(size))
        return self.segments[-1]

    @property
    def held(self) -> int:
        return sum(segment.size for segment in self.segments if segment.is_linked)


@given(st.integers(1, 2**40))
def test_a_block_is_large_enough_and_little_larger(size: int) -> None:
    got = size_class(size)
    assert size <= got <= max(4096, size + size // 7)
    assert size_class(got) == got
    assert got % 64 == 0


@given(st.lists(st.one_of(st.integers(1, 3_000_000), st.integers(-20, -1)), max_size=60))
def test_blocks_never_overlap_and_the_bound_is_kept(steps: list[int]) -> None:
    system = System()
    arena = Arena(system.create, 8 * 2**20)
    held: list[Block] = []
    for step in steps:
        if step > 0:
            block = arena.allocate(step)
            if block is not None:
                assert block.span.size >= step
                held.append(block)
        elif held:
            arena.release(held.pop(step % len(held)))
        assert system.held == arena.use.held_bytes <= 8 * 2**20
        assert arena.use.used_bytes == sum(block.span.size for block in held)
        pieces = sorted((block.address, block.address + block.span.size) for block in held)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(pieces))
        for block in held:
            assert arena.find(block.address, block.span.size) == block.span
    for block in held:
        arena.release(block)
    assert arena.allocate(8 * 2**20) is not None  # everything else was unused and made room


def test_a_note_gives_a_block_back() -> None:
    arena = Arena(System().create, 2**20)
    block = arena.allocate(2**20)
    assert block is not None
    assert arena.allocate(1) is None
    arena.notes.leave(block)
    assert arena.allocate(2**20) is not None


def test_removed_segments_are_told_once() -> None:
    arena = Arena(System().create, 2**20)
    block = arena.allocate(2**20)
    assert block is not None
    arena.release(block)
    assert arena.take_removed() == []
    assert arena.allocate(2**19) is not None
    assert arena.take_removed() == [block.span.segment]
    assert arena.take_removed() == []


def test_what_can_never_fit_is_an_error_at_once() -> None:
    arena = Arena(System().create, 2**20)
    with pytest.raises(PoolError, match="max_shared_bytes"):
        arena.allocate(2**20 + 1)


def test_unused_segments_make_way_where_the_system_has_no_room() -> None:
    system = System(room=3 * 2**20)
    arena = Arena(system.create, 2**40)
    first = arena.allocate(2 * 2**20)
    assert first is not None
    with pytest.raises(PoolError, match="No space left"):
        arena.allocate(2 * 2**20 + 1)
    arena.release(first)
    assert arena.allocate(2 * 2**20 + 1) is not None


def test_bytes_of_others_are_not_found() -> None:
    arena = Arena(System().create, 2**20)
    block = arena.allocate(5000)
    assert block is not None
    end = block.segment.address + block.segment.size
    assert arena.find(block.segment.address - 1, 1) is None
    assert arena.find(end, 1) is None
    assert arena.find(end - 1, 2) is None
    assert arena.find(end - 1, 1) is not None


def test_after_close_there_is_nothing() -> None:
    system = System()
    arena = Arena(system.create, 2**20)
    block = arena.allocate(1)
    assert block is not None
    arena.close()
    assert system.held == 0
    arena.release(block)
    with pytest.raises(PoolError, match="closed"):
        arena.allocate(1)
