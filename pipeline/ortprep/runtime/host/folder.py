"""The folder of a user's host, which only this user can enter, with the host's socket and its lock.

The folder is `ortprep/host` in `$XDG_RUNTIME_DIR`, or where that is not set `host` in the cache folder.
"""

from __future__ import annotations

import _socket
import contextlib
import os
import struct
from typing import TYPE_CHECKING

from ortprep.bundle.file_lock import FileLock
from ortprep.bundle.file_memory import is_protected, require_cache_folder
from ortprep.runtime.descriptors import above_standard

if TYPE_CHECKING:
    from ortprep.errors import HostError

_BACKLOG = 128


class HostFolder(FileLock):
    """The folder, opened, so that nobody can exchange it for another; its lock says that a host is alive.

    Args:
        make: Whether to make it if it is missing.
        descriptor: One that another process opened, checked and locked, and that this one inherited.

    Raises:
        FileNotFoundError: It is missing.
        HostError: Another user could enter or exchange it, or it cannot be opened.
        CacheError: There is no runtime directory, and no cache folder.
    """

    def __init__(self, *, make: bool = False, descriptor: int | None = None) -> None:
        if descriptor is not None:
            self.descriptor, self.path = descriptor, os.readlink(f"/proc/self/fd/{descriptor}")
            return
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        self.path = f"{runtime}/ortprep/host" if os.path.isabs(runtime) else require_cache_folder("host")
        try:
            is_safe = is_protected(self.path, make=make)
            super().__init__(self.path, os.O_DIRECTORY)
            self.descriptor = above_standard(self.descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unsafe(str(error.strerror)) from error
        status = os.fstat(self.descriptor)
        if not is_safe or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            self.close()
            raise self._unsafe("others could enter or exchange it")

    def _unsafe(self, problem: str) -> HostError:
        from ortprep.errors import HostError

        return HostError(
            f"host's folder is not safe to use: {self.path}\n"
            f"  expected a folder of this user with mode 0700, no link: {problem}",
            hint="export XDG_RUNTIME_DIR=DIR   (a folder of your own with mode 0700)",
        )

    def connect(self, timeout_s: float) -> _socket.socket | None:
        """Returns a connection to the host, None if none is alive or its queue is full.

        Raises:
            HostError: The process at the other end is another user's.
        """
        sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(self._address)
            require_same_user(sock)
        except (FileNotFoundError, ConnectionError, BlockingIOError):
            sock.close()
            return None
        except BaseException:  # an interrupt, too, must leave no socket
            sock.close()
            raise
        return sock

    def listen(self) -> _socket.socket:
        """Returns the host's socket; the lock is held, so that of a host that was killed can go."""
        self.remove_socket()
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        listener.bind(self._address)
        listener.listen(_BACKLOG)
        listener.setblocking(True)  # whatever the program's default timeout is
        return listener

    @property
    def _address(self) -> str:
        return f"/proc/self/fd/{self.descriptor}/socket"  # short enough, however long the folder's path is

    def remove_socket(self) -> None:
        """Removes the socket's name, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink("socket", dir_fd=self.descriptor)


def require_same_user(sock: _socket.socket) -> int:
    """Returns the number of the process at the other end; raises `HostError` if it is another user's."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        from ortprep.errors import HostError

        raise HostError(f"process {pid} is another user's\n  expected user {os.geteuid()}, got {uid}")
    return int(pid)
