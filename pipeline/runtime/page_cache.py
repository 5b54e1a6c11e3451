"""The kernel's page cache: have a file read ahead, or have it forgotten."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from pipeline.bundle.regular_file import open_regular

log = logging.getLogger(__name__)

_LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 512 * 1024, 8 * 1024 * 1024


def prefetch_file(path: Path) -> None:
    """Asks the kernel to read a file into the page cache.

    The kernel takes up no more than about one read-ahead window of a request and forgets the rest, so a large
    file is asked for window by window. A system that cannot be asked, as macOS, is left alone.

    Raises:
        OSError: The file cannot be opened, or is no regular file.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with open_regular(path) as file:
        handle = file.fileno()
        status = os.fstat(handle)
        step = _read_ahead_bytes(status.st_dev)
        for offset in range(0, status.st_size, step):
            os.posix_fadvise(handle, offset, step, os.POSIX_FADV_WILLNEED)


def drop_file(path: Path) -> None:
    """Drops a file from the page cache, so that the next reader waits for the disk as after a reboot.

    Pages that some process has mapped stay, and so does everything on a file system that lives in memory.

    Raises:
        OSError: The file cannot be opened, or is no regular file.
    """
    with open_regular(path) as file:
        handle = file.fileno()
        # Dirty pages cannot be dropped.
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def start_prefetch(paths: Sequence[Path]) -> threading.Thread:
    """Prefetches files in a thread of its own, since the kernel may take as long as the disk does to accept.

    A file that cannot be read is left to the reader that needs it: prefetching never fails a load.
    """
    thread = threading.Thread(
        target=_prefetch_all, args=(tuple(paths),), name="ortprep-prefetch", daemon=True
    )
    thread.start()
    return thread


def _prefetch_all(paths: tuple[Path, ...]) -> None:
    for path in paths:
        try:
            prefetch_file(path)
        except OSError as error:
            log.debug("not prefetched: %s: %s", path, error)


def _read_ahead_bytes(device: int) -> int:
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        window = int(setting.read_text(encoding="ascii")) * 1024
    except (OSError, ValueError):
        window = 0
    return min(max(window, _LEAST_BLOCK_BYTES), _MOST_BLOCK_BYTES)
