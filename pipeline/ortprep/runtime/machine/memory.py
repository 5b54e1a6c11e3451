"""Memory of this process, by the kernel's own accounts, in bytes; and the page cache, filled or dropped."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ortprep.bundle.file_memory import open_regular
from ortprep.runtime.machine.processor import group_folders, read_text

if TYPE_CHECKING:
    import threading

_SMAPS_ROLLUP, _STATUS = "/proc/self/smaps_rollup", "/proc/self/status"
_GROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use of a control group, in version 2 of the interface and in version 1."""

_WINDOW_BYTES = 512 * 1024
"""Size of a request: the kernel takes up about one read-ahead window of each, and forgets the rest."""


def private_bytes() -> int:
    """Returns the anonymous memory of this process: what another process on the same files cannot share.

    Mapped weights are not in it, so, unlike the resident set,
    it differs between a prepared model and a default one.
    """
    value = _read_field(_SMAPS_ROLLUP, "Anonymous:")
    if value is None:
        value = _read_field(_STATUS, "RssAnon:")
    return 0 if value is None else value


def written_bytes() -> int:
    """Returns the memory that this process alone has written to: of a fork, what it does not share."""
    value = _read_field(_SMAPS_ROLLUP, "Private_Dirty:")
    return private_bytes() if value is None else value


def peak_rss_bytes() -> int:
    """Returns the largest resident set of this process alone, mapped pages included.

    The kernel's high-water mark starts afresh at exec; that of `getrusage` is inherited from the parent.
    """
    value = _read_field(_STATUS, "VmHWM:")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if value is None else value


def available_bytes() -> int:
    """Returns how much memory a child may take: nine tenths of what is free, so that it fails first."""
    return free_bytes() * 9 // 10


def free_bytes() -> int:
    """Returns how much more memory this process may take: what machine and control groups have free."""
    machine = _read_field("/proc/meminfo", "MemAvailable:")
    if machine is None:
        machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([machine, *(limit - used for limit, used in _read_control_groups())]))


def _read_control_groups() -> Iterator[tuple[int, int]]:
    """Yields limit and use of every control group that this process is in."""
    for folder in group_folders("/", "memory"):
        for names in _GROUP_FILES:
            limit, used = (read_text(f"{folder}/{name}") for name in names)
            if limit.isdigit() and used.isdigit():  # else there is none, or no limit ("max")
                # Files that were read and not used since are given up for whatever is needed.
                cached = _read_field(f"{folder}/memory.stat", "inactive_file ", scale=1) or 0
                yield int(limit), max(0, int(used) - cached)


def _read_field(path: str, name: str, *, scale: int = 1024) -> int | None:
    line = next((line for line in read_text(path).splitlines() if line.startswith(name)), None)
    return None if line is None else int(line.split()[1]) * scale


def prefetch_file(path: str | os.PathLike[str]) -> None:
    """Asks the kernel to read a file into the page cache.

    Raises:
        OSError: The file cannot be opened, or is no regular file.
    """
    with open_regular(path) as file:
        handle = file.fileno()
        for offset in range(0, os.fstat(handle).st_size, _WINDOW_BYTES):
            os.posix_fadvise(handle, offset, _WINDOW_BYTES, os.POSIX_FADV_WILLNEED)


def drop_file(path: str | os.PathLike[str]) -> None:
    """Drops a file from the page cache, so that the next reader waits for the disk as after a reboot.

    Pages that some process has mapped stay, and so does everything on a file system in memory.

    Raises:
        OSError: The file cannot be opened, or is no regular file.
    """
    with open_regular(path) as file:
        handle = file.fileno()
        # Dirty pages cannot be dropped.
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def start_prefetch(paths: Sequence[str | os.PathLike[str]]) -> threading.Thread:
    """Prefetches files in a thread of its own, since the kernel may take as long as the disk does to accept.

    A file that cannot be read is left to the reader that needs it: prefetching never fails a load.
    """
    import threading

    thread = threading.Thread(
        target=_prefetch_all, args=(tuple(paths),), name="ortprep-prefetch", daemon=True
    )
    thread.start()
    return thread


def is_cached(path: str, size_bytes: int) -> bool:
    """Returns whether a file's first, middle and last byte are in the page cache."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for offset in (0, size_bytes // 2, size_bytes - 1):
                os.preadv(handle, [bytearray(1)], max(offset, 0), os.RWF_NOWAIT)
        finally:
            os.close(handle)
    except OSError:
        return False
    return True


def _prefetch_all(paths: tuple[str | os.PathLike[str], ...]) -> None:
    for path in paths:
        try:
            prefetch_file(path)
        except OSError as error:
            import logging

            logging.getLogger(__name__).debug("not prefetched: %s: %s", path, error)
