"""Folders for temporary files that nobody else can exchange, and that are gone afterwards."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ortprep.bundle.file_lock import FileLock
from ortprep.bundle.file_memory import cache_folder, is_protected
from ortprep.errors import CacheError

log = logging.getLogger(__name__)

_SHARED_MEMORY = "/dev/shm"
_MAX_ATTEMPTS, _RETRY_DELAY_S = 50, 0.02
_ABANDONED_S = 60.0


@contextmanager
def scratch_folder(prefix: str, place: str | None = None) -> Iterator[Path]:
    """Yields a new folder of this user's, and removes it even if a signal handler raises at any line.

    Folders of the same prefix that killed processes left behind are removed, too: no process has them locked.

    `tempfile.TemporaryDirectory` leaves its folder behind if that happens between the folder's creation and
    the block, or during the removal. Here the name is known before the folder is made, and an interrupted
    removal starts again.

    The folder is where other users can neither replace it nor a folder above it: in the folder for temporary
    files, else in the cache, else in shared memory.

    Args:
        prefix: First part of the folder's name.
        place: Where it is to be instead: a folder that no other user can write to.

    Raises:
        CacheError: Others could replace it in each of these places.
        OSError: The folder cannot be made.
    """
    place = place or _safe_place()
    _remove_abandoned(place, prefix)
    folder = Path(place, f"{prefix}{os.urandom(8).hex()}")
    try:
        folder.mkdir(mode=0o700)
        with FileLock(folder, os.O_DIRECTORY) as lock:
            with suppress(OSError):  # a file system without locks, where nothing is removed either
                lock.acquire()
            yield folder
    finally:
        try:
            _remove(folder)
        finally:
            _remove(folder)


def _safe_place() -> str:
    """Returns the first of three folders where nobody else can move what is this user's."""
    usual = tempfile.gettempdir()
    if _is_safe(usual):
        return usual
    # Looked at only now, since the cache's folder is made by asking for it.
    for place in (cache_folder("scratch"), _SHARED_MEMORY):
        if place is not None and _is_safe(place):
            return place
    raise CacheError(
        f"no safe folder for temporary files: {usual}\n"
        "  expected one in which, and above which, other users can replace nothing that is not theirs",
        hint="export TMPDIR=DIR   (a folder of your own)",
    )


def _is_safe(place: str) -> bool:
    try:
        return is_protected(place, for_own_files=True) and os.access(place, os.W_OK | os.X_OK)
    except OSError:
        return False


def _remove_abandoned(place: str, prefix: str) -> None:
    """Removes this user's folders of a prefix that no process has locked."""
    for folder in Path(place).glob(f"{prefix}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _ABANDONED_S:
                continue  # it may not be locked yet
            with FileLock(folder, os.O_DIRECTORY) as lock:
                if lock.acquire(wait=False):
                    shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path) -> None:
    for _ in range(_MAX_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        # A process that is being killed may still write into it.
        time.sleep(_RETRY_DELAY_S)
    log.warning("cannot remove %s", folder)
