"""Is there room on the disk? Asked when a file could not be written, since ONNX Runtime does not say why."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pipeline.errors import StageError, hint_of_os_error


def require_room(folder: Path, size_bytes: int) -> None:
    """Reserves a file of that size for a moment: quotas and limits count, which no free figure shows.

    Args:
        folder: Where the file would be.
        size_bytes: Its size, at least 1.

    Raises:
        StageError: It does not fit.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        raise StageError(
            f"no room for the optimised model in {folder}\n"
            f"  expected {size_bytes} bytes, got none: {error.strerror}",
            hint=hint_of_os_error(error, str(folder)),
        ) from error
