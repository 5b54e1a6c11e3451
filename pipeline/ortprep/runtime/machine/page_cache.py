"""The kernel's page cache: have a file read ahead, or have it forgotten."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ortprep.bundle.file_memory import open_regular

if TYPE_CHECKING:
    import threading

_WINDOW_BYTES = 512 * 1024
"""Size of a request: the kernel takes up about one read-ahead window of each, and forgets the rest."""


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
