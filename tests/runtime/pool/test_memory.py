"""Regions of shared memory: whose they are, and what they cost."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.errors import NoRoomError, PoolError
from ortprep.runtime.pool.memory import PAGE_BYTES, MemoryFile, Region, RegionTable
from ortprep.runtime.tensors.array_layout import create_memory

MB = 2**20
_BYTE = np.dtype(np.uint8)


def resident(file: MemoryFile) -> int:
    """Bytes of a file that take memory."""
    text = Path("/proc/self/smaps").read_text()
    part = text[text.index(f"{file.bytes.ctypes.data:x}-") :]
    return int(part[part.index("Rss:") :].split()[1]) * 1024


def test_more_than_a_file_can_have_is_an_error_of_the_pool():
    with pytest.raises(PoolError, match="cannot make"):
        RegionTable(2**40, 2**36)


@pytest.mark.attack
def test_a_size_that_was_sealed_cannot_be_changed():
    descriptor = create_memory("ortprep-pool", 4 * PAGE_BYTES)
    for size in (0, PAGE_BYTES, 8 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)


@given(st.lists(st.tuples(st.sampled_from(["take", "answer", "end"]), st.integers(1, 3 * MB)), max_size=60))
def test_no_two_hold_the_same_region_and_answers_to_small_requests_always_have_one(steps):
    table = RegionTable(4, 8 * MB)
    held: list[Region] = []
    for step, size in steps:
        if step == "take" and table.has_room(size):
            held.append(table.take(size))
            table.file.view(held[-1].begin, _BYTE, (size,))[...] = len(held)
        elif step == "answer" and sum(region.is_for_answer for region in held) < 4:
            held.append(table.take(0))
            table.file.view(held[-1].begin, _BYTE, (size,))[...] = len(held)
            table.note_written(held[-1], size)
        elif step == "end" and held:
            table.release(held.pop(size % len(held)))
        begins = [region.begin for region in held]
        assert len(set(begins)) == len(begins)
        assert table.used_bytes <= 8 * MB
        assert table.held_bytes <= max(8 * MB, sum(region.kept for region in held))
        assert resident(table.file) <= table.held_bytes
    table.close()


def test_requests_wait_for_bytes_and_too_large_ones_are_refused():
    table = RegionTable(4, 8 * MB)
    first = table.take(5 * MB)
    assert table.has_room(3 * MB)
    assert not table.has_room(3 * MB + 1)
    table.release(first)
    assert table.has_room(8 * MB)
    with pytest.raises(NoRoomError, match="does not fit"):
        table.require_room(8 * MB + 1)
    table.close()


def test_pages_are_kept_for_the_next_slot_up_to_the_limit():
    table = RegionTable(4, 8 * MB)
    regions = [table.take(3 * MB), table.take(3 * MB), table.take(0)]
    table.note_written(regions[2], 6 * MB)
    for region in regions:
        table.file.view(region.begin, _BYTE, (region.kept,))[...] = 1
    for region in regions:
        table.release(region)
    assert resident(table.file) == table.held_bytes == 6 * MB
    assert table.take(MB) is regions[2]
    table.close()
