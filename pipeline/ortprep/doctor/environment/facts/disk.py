"""Size of a folder's file system, and read speed of its files: from the disk, and from the page cache."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import BinaryIO

from ortprep.bundle.file_memory import open_regular
from ortprep.doctor.environment.facts.records import DiskSpace, ReadSpeed

MAX_BYTES = 64 * 1024 * 1024
"""Bytes read at most."""

_MIN_BYTES = 16 * 1024 * 1024
"""A smaller file shows the first seek rather than the speed."""

_BUDGET_S = 1.2
"""Seconds that one reading takes at most."""

_MIN_RATIO = 2.0
"""A first reading that is not this much slower than the second came from memory too."""

_MAX_FILES = 10_000
_BLOCK_BYTES = 1024 * 1024


def read_disk_space(folder: Path) -> DiskSpace:
    """Reads the size of the file system that a folder is on, or will be on once it is made."""
    usage = shutil.disk_usage(_existing_level(folder))
    return DiskSpace(str(folder), usage.total, usage.free)


def measure_reading(folder: Path) -> ReadSpeed | None:
    """Measures how fast a folder's files are read.

    The beginning of the largest file below it is dropped from the page cache and read twice, so that it ends
    in the cache.

    Returns:
        None if there is no file that is large enough.
    """
    try:
        existing = _largest_file(folder)
        if existing is None:
            return None
        with open_regular(existing) as file:
            return _measure(file)
    except OSError:
        return None


def _measure(file: BinaryIO) -> ReadSpeed:
    handle = file.fileno()
    size = min(os.fstat(handle).st_size, MAX_BYTES)
    os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)
    cold_bytes, cold_s = _read(handle, size)
    # What the first reading had no time for is not in the cache.
    warm_bytes, warm_s = _read(handle, cold_bytes)
    cold, warm = cold_bytes / cold_s, warm_bytes / warm_s
    return ReadSpeed(warm_bytes, warm, cold if warm >= _MIN_RATIO * cold else None)


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


def _existing_level(folder: Path) -> Path:
    return next(level for level in (folder, *folder.parents) if level.is_dir())
