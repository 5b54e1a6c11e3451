"""Locks of one user: a measurement holds its device exclusively, other heavy work shares it.

The locks are `flock`s on files in a folder of the user's own, one file per device or folder; the kernel
releases them when their process ends. `flock` is not fair: new shared holders overtake a waiting exclusive
one. So everyone first passes a gate, a second lock that is held only while waiting for the device: once a
measurement waits at the device, later arrivals wait at the gate.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path

from ortprep.bundle.file_lock import FileLock
from ortprep.bundle.file_memory import cache_folder, require_private_folder
from ortprep.errors import StageError

CPU_DEVICE = "cpu"

_holding: ContextVar[bool] = ContextVar("_holding", default=False)


@contextmanager
def measuring(device: str, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds a device exclusively while the block runs; waits until it is free.

    A measurement on a GPU holds the CPU as well: half of the measured work happens there.

    Args:
        device: `cpu` or `cuda:<index>`.
        on_wait: Called once if the device is not free at once.

    Raises:
        StageError: This thread already holds a device.
        CacheError: The lock folder cannot be trusted.
    """
    if _holding.get():
        raise StageError(f"cannot measure on {device}: this thread already works on a device")
    # The CPU last: what waits for a GPU must not keep the whole machine waiting too.
    devices = [CPU_DEVICE] if device == CPU_DEVICE else [device, CPU_DEVICE]
    with _held(devices, on_wait=on_wait):
        yield


@contextmanager
def working(*, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Shares the CPU with other heavy work, but with no measurement, while the block runs.

    Within another such block, or within `measuring`, it does nothing.

    Raises:
        CacheError: The lock folder cannot be trusted.
    """
    if _holding.get():
        yield
        return
    with _held([CPU_DEVICE], shared=True, on_wait=on_wait):
        yield


@contextmanager
def hold_folder(folder: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Keeps this user's other threads and processes from a folder while the block runs; waits for them.

    The folder itself is not locked: another user who may read it could hold such a lock for ever.

    Args:
        folder: An existing folder, by any of its names.
        on_wait: Called once if the folder is not free at once.

    Raises:
        CacheError: The lock folder cannot be trusted.
        OSError: There is no such folder.
    """
    status = folder.stat()
    path = lock_folder() / f"folder-{status.st_dev}-{status.st_ino}.lock"
    with lock_file(path, on_wait):
        yield


def lock_folder() -> Path:
    """Returns the folder of the lock files, which only this user can write; makes it if needed.

    It is in `$XDG_RUNTIME_DIR`, else in the cache folder, one for each machine that has the same home; else,
    for a user without one, in the folder for temporary files. Nothing that another user does changes which.

    Raises:
        CacheError: Others can write it or move it, or it cannot be made.
    """
    # Containers and cron inherit the variable without the folder it names.
    runtime = os.environ.get("XDG_RUNTIME_DIR") or os.devnull
    if Path(runtime).is_dir():
        hint = "unset XDG_RUNTIME_DIR, or set it to a folder of your own"
        return Path(require_private_folder(f"{runtime}/ortprep", hint=hint))
    cached = cache_folder(f"locks/{os.uname().nodename}")
    return Path(cached or require_private_folder(f"{tempfile.gettempdir()}/ortprep-{os.getuid()}"))


@contextmanager
def _held(devices: list[str], *, shared: bool = False, on_wait: Callable[[], None] | None) -> Iterator[None]:
    """Holds the locks of devices until the block ends."""
    folder = lock_folder()
    report_wait = functools.cache(on_wait or (lambda: None))  # once for all locks
    with ExitStack() as stack:
        for device in devices:
            with lock_file(folder / f"{device}.gate", report_wait):
                stack.enter_context(lock_file(folder / f"{device}.lock", report_wait, shared=shared))
        token = _holding.set(True)
        try:
            yield
        finally:
            _holding.reset(token)


@contextmanager
def lock_file(path: Path, on_wait: Callable[[], None], *, shared: bool = False) -> Iterator[None]:
    """Holds the lock of a file, which is made, until the block ends.

    Args:
        path: The file, in a folder that no other user can open, who could hold its lock for ever.
        on_wait: Called once if the lock is not free at once.
        shared: Whether others may share it.

    Raises:
        StageError: The file system has no locks.
        OSError: The file cannot be made.
    """
    # Never removed: a process that waits on the removed file would hold a lock that no other knows of.
    with FileLock(path) as lock:
        try:
            is_free = lock.acquire(shared=shared, wait=False)
        except OSError as error:  # some file systems of networks have none
            raise StageError(
                f"cannot lock a file: {path}\n  {error.strerror}",
                hint="export XDG_RUNTIME_DIR=DIR   (a folder of your own on this machine)",
            ) from error
        if not is_free:
            on_wait()
            lock.acquire(shared=shared)
        yield
