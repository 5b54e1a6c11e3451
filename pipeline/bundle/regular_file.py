"""Opening files that others put there."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading, and nothing else: a FIFO would make its reader wait for ever.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    # Without waiting for a writer, should it be a FIFO; regular files know no difference.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")
