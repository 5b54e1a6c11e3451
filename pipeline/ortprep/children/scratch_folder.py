"""Folders for temporary files, removed whatever ends their use."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_MAX_ATTEMPTS, _RETRY_DELAY_S = 50, 0.02


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yields a new folder of this user's, and removes it even if a signal handler raises at any line.

    `tempfile.TemporaryDirectory` leaves its folder behind if that happens between the folder's creation and
    the block, or during the removal. Here the name is known before the folder is made, and an interrupted
    removal starts again.

    Args:
        prefix: First part of the folder's name.

    Raises:
        OSError: The folder cannot be made.
    """
    folder = Path(tempfile.gettempdir(), f"{prefix}{os.urandom(8).hex()}")
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        try:
            _remove(folder)
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    for _ in range(_MAX_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        # A process that is being killed may still write into it.
        time.sleep(_RETRY_DELAY_S)
    log.warning("cannot remove %s", folder)
