"""Folders for temporary files that nobody else can exchange, and that are gone afterwards."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ortprep.bundle.file_memory import cache_folder, is_protected
from ortprep.errors import CacheError

log = logging.getLogger(__name__)

_SHARED_MEMORY = "/dev/shm"
_MAX_ATTEMPTS, _RETRY_DELAY_S = 50, 0.02


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yields a new folder of this user's, and removes it even if a signal handler raises at any line.

    `tempfile.TemporaryDirectory` leaves its folder behind if that happens between the folder's creation and
    the block, or during the removal. Here the name is known before the folder is made, and an interrupted
    removal starts again.

    The folder is where other users can neither replace it nor a folder above it: in the folder for temporary
    files, else in the cache, else in shared memory.

    Args:
        prefix: First part of the folder's name.

    Raises:
        CacheError: Others could replace it in each of these places.
        OSError: The folder cannot be made.
    """
    folder = Path(_safe_place(), f"{prefix}{os.urandom(8).hex()}")
    try:
        folder.mkdir(mode=0o700)
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


def _remove(folder: Path) -> None:
    for _ in range(_MAX_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        # A process that is being killed may still write into it.
        time.sleep(_RETRY_DELAY_S)
    log.warning("cannot remove %s", folder)
