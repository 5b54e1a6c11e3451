"""Locks of files and folders (`flock`) that end with the process that took them.

A fork has copies of all descriptors, and a lock lasts as long as any copy, as a connection does. So a fork of
this process closes those of locks first, and what else is to end with this process.
"""

from __future__ import annotations

import os
import weakref
from _thread import RLock
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from ortprep.bundle.file_memory import StrPath

NO_FORK: Any = RLock()
"""Held while this process is forked; a signal's handler may take it again."""

_OWNERS: weakref.WeakSet[Any] = weakref.WeakSet()


def forget_in_forks(owner: Any) -> None:
    """Has forks of this process call an object's `forget`; its descriptors are made in the same `NO_FORK`."""
    _OWNERS.add(owner)


def _forget_all() -> None:
    NO_FORK._at_fork_reinit()  # not `release`: a server that forks in C may not have called `acquire`
    for owner in tuple(_OWNERS):
        owner.forget()


os.register_at_fork(before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=_forget_all)


class FileLock:
    """A file or folder that is opened to be locked, until it is closed; a file is made if it is missing.

    Args:
        path: Its path; only where no other user can open it, nobody else can hold the lock.
        flags: How it is opened.

    Raises:
        OSError: It cannot be opened, or is a link.
    """

    descriptor = -1

    def __init__(self, path: StrPath, flags: int = os.O_RDWR | os.O_CREAT) -> None:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        with NO_FORK:
            # Opened and kept in one call: a signal's handler may raise after any, and it would be lost.
            vars(self).update(zip(["descriptor"], map(os.open, [path], [flags], [0o600]), strict=True))
            forget_in_forks(self)

    def acquire(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Takes the lock, and returns whether it did.

        Args:
            shared: Whether others may share it.
            wait: Whether to wait for others.

        Raises:
            OSError: The file system has no locks.
        """
        import fcntl  # here, since a client that finds a host needs no lock

        mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(self.descriptor, mode)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Closes it, once, and releases the lock unless another process was given the descriptor."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    forget = close
    __del__ = close  # if an interrupt comes before it is closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
