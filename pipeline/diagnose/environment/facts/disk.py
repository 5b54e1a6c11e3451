"""Read speed of a folder's files: from the disk, and from the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ortprep.bundle.file_memory import open_regular
from ortprep.diagnose.environment.facts.records import ReadSpeed

MAX_BYTES = 64 * 1024 * 1024
"""Bytes read at most."""

_MIN_BYTES = 16 * 1024 * 1024
"""A smaller file tells more of the first seek than of the speed."""

_BUDGET_S = 1.2
"""Seconds one reading takes at most; a slow disk's speed is told by less than all of it."""

_MAX_FILES = 10_000
_BLOCK_BYTES = 1024 * 1024
_CACHED_SHARE = 0.5
_SAMPLES = 4


def measure_reading(folder: Path) -> ReadSpeed | None:
    """Measures how fast a folder's files are read.

    The beginning of the largest file below it is dropped from the page cache and read twice, so that it ends
    in the cache. Where there is none large enough, a file is written for it and deleted.

    Returns:
        None if there is nothing to read and nothing can be written.
    """
    try:
        existing = _largest_file(folder)
        if existing is None:
            with _scratch_file(folder) as file:
                return _measure(file, "")
        with open_regular(existing) as file:
            return _measure(file, str(existing))
    except OSError:
        return None


def _measure(file: BinaryIO, name: str) -> ReadSpeed:
    handle = file.fileno()
    size = min(os.fstat(handle).st_size, MAX_BYTES)
    obstacle = _drop(handle, size)
    cold_bytes, cold_s = _read(handle, size)
    # What did not fit the time of the cold reading is not in the cache.
    warm_bytes, warm_s = _read(handle, cold_bytes)
    return ReadSpeed(
        file=name,
        size_bytes=warm_bytes,
        warm_bytes_per_s=warm_bytes / warm_s,
        cold_bytes_per_s=None if obstacle else cold_bytes / cold_s,
        obstacle=obstacle,
    )


def _drop(handle: int, size: int) -> str:
    """Drops the beginning of a file from the page cache, and says why that did not work; "" if it did."""
    if not hasattr(os, "posix_fadvise"):
        return "this system does not let a file be dropped from the page cache"
    os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
    share = _cached_share(handle, size)
    if share is None:
        return "this file system does not tell what of another user's file is cached"
    return (
        ""
        if share < _CACHED_SHARE
        else "the file stays in the page cache: its file system is in memory, or it is mapped"
    )


def _cached_share(handle: int, size: int) -> float | None:
    """Returns the share of a file's first pages that are in the page cache, None where that is not told."""
    # The kernel tells a file's pages to its owner, and everybody else that all of them are there.
    owned = os.geteuid() in (0, os.fstat(handle).st_uid)
    return _share_of_pages(handle, size) if owned else _share_of_samples(handle, size)


def _share_of_pages(handle: int, size: int) -> float:
    pages = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * pages)()
    with mmap.mmap(handle, size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), resident
        )
        del first  # the map cannot be closed while something points into it
    return 1.0 if failed else sum(flag & 1 for flag in resident) / pages


def _share_of_samples(handle: int, size: int) -> float | None:
    """Reads a byte here and there without waiting; from the end, as the kernel reads ahead forwards."""
    cached = 0
    for sample in reversed(range(_SAMPLES)):
        try:
            cached += os.preadv(handle, [bytearray(1)], sample * size // _SAMPLES, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        except OSError:
            return None
    return cached / _SAMPLES


def _read(handle: int, size: int) -> tuple[int, float]:
    """Reads the beginning of a file, as much of it as the time allows; returns bytes and seconds."""
    buffer = bytearray(_BLOCK_BYTES)
    started = time.perf_counter()
    done = 0
    while done < size and time.perf_counter() - started < _BUDGET_S:
        count = os.preadv(handle, [memoryview(buffer)[: size - done]], done)
        if count == 0:
            break
        done += count
    return done, max(time.perf_counter() - started, 1e-9)


def _largest_file(folder: Path) -> Path | None:
    sizes = []
    for number, path in enumerate(folder.rglob("*") if folder.is_dir() else ()):
        if number >= _MAX_FILES:
            break
        if path.is_file() and not path.is_symlink():
            sizes.append((path.stat().st_size, path))
    size, path = max(sizes, default=(0, folder))
    return path if size >= _MIN_BYTES else None


@contextmanager
def _scratch_file(folder: Path) -> Iterator[BinaryIO]:
    there = next(level for level in (folder, *folder.parents) if level.is_dir())
    with tempfile.TemporaryFile(dir=there, prefix=".ortprep-doctor-") as file:
        # Bytes that no file system squeezes: a compressed disk would tell the processor's speed.
        block = os.urandom(_BLOCK_BYTES)
        for _ in range(_MIN_BYTES // _BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield file
