"""Files and folders that appear whole or not at all, whatever instant the writer is killed at."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ortprep.bundle.codec import format_json

TEMP_PREFIX = ".tmp-"
"""Names that begin so are unfinished work: readers never look at them, the next writer removes old ones."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _unused_name(path: Path) -> Path:
    """Returns a name nothing has; what is made under it has the permissions the user's umask asks for."""
    return path.with_name(f"{TEMP_PREFIX}{path.name}~{os.urandom(8).hex()}")


@contextmanager
def new_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yields a temporary file that becomes `path` when the block ends without an error.

    Raises:
        OSError: The folder is read-only or full; the old file is then untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _unused_name(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # an interrupt, too, must leave no temporary file
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_file(path.parent)


def write_bytes_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Writes a file so that readers see the old content or the new, never a part; as `new_file`."""
    with new_file(path, durable=durable) as file:
        file.write(data)


def write_json_atomic(path: Path, data: Any) -> None:
    """Writes JSON as `format_json` lays it out; as `write_bytes_atomic`."""
    write_bytes_atomic(path, format_json(data))


def sync_file(path: Path) -> None:
    """Flushes a file, or a folder's entries, to its disk: a rename survives a power cut then."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flushes every file and folder below `folder`."""
    for root, _, files in os.walk(folder):
        for name in files:
            sync_file(Path(root) / name)
        sync_file(Path(root))


@contextmanager
def new_folder(destination: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields an empty temporary folder that becomes `destination` when the block ends without an error.

    An existing `destination` is exchanged with it in one system call and then removed, so that at any instant
    one of the two, whole, stands there.

    Args:
        destination: The folder.
        durable: Whether to wait until the disk has all of it; what can be fetched again, and is checked
            before it is used, need not.

    Raises:
        OSError: The file system is read-only or full; `destination` is then untouched.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = _unused_name(destination)
    temporary.mkdir()
    try:
        yield temporary
        if durable:
            sync_tree(temporary)
        _put_in_place(temporary, destination)
    finally:
        _remove_tree(temporary)


def _remove_tree(folder: Path) -> None:
    # Imported here: a job writes single files at most, and this brings in every archive format.
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(temporary: Path, destination: Path) -> None:
    try:
        temporary.rename(destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        _exchange(temporary, destination)
    sync_file(destination.parent)


def _exchange(left: Path, right: Path) -> None:
    """Swaps two directory entries atomically (Linux 3.15 renameat2, glibc 2.28)."""
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        if renameat2(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(right))
    import logging  # costs a job milliseconds

    logging.getLogger(__name__).warning(
        "%s: this file system cannot exchange folders; the old one is absent for an instant", right
    )
    aside = _unused_name(right)
    right.rename(aside)
    try:
        left.rename(right)
    except OSError:
        aside.rename(right)
        raise
    _remove_tree(aside)


def remove_stale_temporaries(path: Path, *, min_age_s: float = 0.0) -> None:
    """Removes what killed writers of `path` left behind; call it under that path's lock.

    Without a lock, `min_age_s` has to be longer than any writer takes. A writer that takes longer still fails
    when it puts its folder in place: the folder is renamed before its first file is removed.
    """
    import glob  # a load imports this module

    for leftover in path.parent.glob(f"{TEMP_PREFIX}{glob.escape(path.name)}~{'[0-9a-f]' * 16}"):
        with suppress(FileNotFoundError):  # another process removes it, or has put it in place
            if min_age_s and time.time() - leftover.lstat().st_mtime < min_age_s:
                continue
            moved = leftover.rename(_unused_name(path))
            if moved.is_dir():
                _remove_tree(moved)
            else:
                moved.unlink()
