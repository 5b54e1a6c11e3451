"""Regions of shared memory: whose they are, and what they cost."""

from __future__ import annotations

import fcntl
import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.errors import NoRoomError, PoolError
from ortprep.runtime.pool.memory import PAGE_BYTES, MemoryFile, Region, RegionTable, create_memory
from ortprep.runtime.tensors.element_types import Array

MB = 2**20
_BYTE = np.dtype(np.uint8)


def resident(file: MemoryFile) -> int:
    """Bytes of a file that take memory."""
    text = Path("/proc/self/smaps").read_text()
    part = text[text.index(f"{file.address:x}-") :]
    return int(part[part.index("Rss:") :].split()[1]) * 1024


def test_more_than_a_file_can_have_is_an_error_of_the_pool():
    with pytest.raises(PoolError, match="cannot make"):
        create_memory(2**64)


@pytest.mark.attack
def test_a_size_that_was_sealed_cannot_be_changed():
    descriptor = create_memory(4 * PAGE_BYTES)
    for size in (0, PAGE_BYTES, 8 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)


@given(
    st.lists(st.tuples(st.sampled_from(["take", "lend", "grow", "end"]), st.integers(1, 3 * MB)), max_size=60)
)
def test_no_two_hold_the_same_region_and_a_reserved_one_is_always_left(steps):
    """Whatever is in use, each worker can have a region for an answer that needs more than was foreseen."""
    table = RegionTable(6, 2, 8 * MB)
    held: list[tuple[Region | None, Array | None, int]] = []
    grown = 0
    for step, size in steps:
        if step in ("take", "lend") and table.has_room(size):
            region = table.take(size)
            array = table.lend(region).view(_BYTE, (size,)) if step == "lend" else None
            held.append((None if step == "lend" else region, array, region.begin))
            table.file.view(region.begin, _BYTE, (size,))[...] = len(held)
        elif step == "grow" and grown < 2:
            grown += 1
            region = table.grow(None, size)
            held.append((region, None, region.begin))
        elif step == "end" and held:
            region_or_none, array, begin = held.pop(size % len(held))
            assert array is None or (table.find(array) == begin and (array == array[0]).all())
            if region_or_none is not None:
                table.release(region_or_none)
            del array
        begins = [begin for _, _, begin in held]
        assert len(set(begins)) == len(begins)
        assert table.held_bytes <= max(8 * MB, table.used_bytes + 6 * PAGE_BYTES)
        assert resident(table.file) <= table.held_bytes
    del held
    table.collect()
    table.close()


def test_requests_wait_for_bytes_and_too_large_ones_are_refused():
    table = RegionTable(6, 2, 8 * MB)
    first = table.take(5 * MB)
    assert table.has_room(3 * MB)
    assert not table.has_room(3 * MB + 1)
    assert table.grow(None, 4 * MB).size == 4 * MB  # an answer is never refused
    assert not table.has_room(0)  # then not even a small request is taken
    table.release(first)
    assert table.has_room(0)
    with pytest.raises(NoRoomError, match="does not fit"):
        table.require_room(8 * MB + 1)
    table.close()


def test_pages_are_kept_for_the_next_slot_up_to_the_limit():
    table = RegionTable(6, 2, 8 * MB)
    regions = [table.take(3 * MB), table.take(3 * MB), table.grow(None, 6 * MB)]
    for region in regions:
        table.file.view(region.begin, _BYTE, (region.size,))[...] = 1
    for region in regions:
        table.release(region)
    assert resident(table.file) == table.held_bytes == 6 * MB
    assert table.take(MB) is regions[2]
    table.close()


def test_an_array_keeps_its_region_even_after_the_pool_is_closed():
    table = RegionTable(6, 2, 8 * MB)
    arrays = [table.lend(table.take(MB)).view(_BYTE, (MB,)) for _ in range(3)]
    for array in arrays:
        array[...] = 7
    part = arrays[2][5:9]
    del array, arrays[2]
    gc.collect()
    assert not table.collect()
    assert (part == 7).all()
    del part
    gc.collect()
    assert table.collect()
    assert table.find(np.ones(MB, np.uint8)) is None
    table.close()
    arrays.pop()
    gc.collect()
    assert resident(table.file) == MB
    assert (arrays[0] == 7).all()
