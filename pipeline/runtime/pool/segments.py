"""Shared memory itself: segments that the pool's process makes, workers map, and no crash leaves behind.

The pool's process alone makes and removes segments. Python's resource tracker, a process of its own, removes
them when that process is killed; should both be killed at once, the next pool removes what it finds of
processes that are gone.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PoolError
from pipeline.runtime.pool.wire import Span

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"ortprep-(\d+)-(\d+)-(\d+)-[0-9a-f]{8}-\d+")
_NAMESPACE = Path("/proc/self/ns/pid")


class _Address:
    """What makes an array of an address; the array keeps it, and with it what it holds, alive."""

    __slots__ = ("__array_interface__", "_held")

    def __init__(self, address: int, size: int, held: object = None) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }
        self._held = held


def bytes_at(address: int, size: int, held: object = None) -> NDArray[np.uint8]:
    """Returns an array over some bytes of this process.

    Args:
        address: Of the first one.
        size: How many.
        held: Kept alive by the array and everything that is cut from it.
    """
    return np.asarray(_Address(address, size, held)) if size else np.empty(0, np.uint8)


class OwnSegment:
    """A segment made by this process; unmapped when nobody refers to it any more.

    Args:
        name: Its name in `/dev/shm`.
        size: In bytes.

    Raises:
        OSError: There is no room for it.
    """

    def __init__(self, name: str, size: int) -> None:
        self._memory = SharedMemory(name, create=True, size=size)
        self.size = size
        try:
            # Without this, the first write to a page that finds no room is a SIGBUS.
            descriptor = os.open(_FOLDER / name, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError:
            self.unlink()
            raise
        # That array is gone at once, since it would keep the mapping from ever being closed.
        self.address: int = np.ndarray(size, np.uint8, self._memory.buf).ctypes.data
        self.bytes = bytes_at(self.address, size)

    def unlink(self) -> None:
        """Removes its name; the memory stays until the last mapping goes."""
        with suppress(FileNotFoundError):
            self._memory.unlink()


def segment_prefix() -> str:
    """Returns what the names of a new pool's segments begin with: whose they are, and a random part."""
    pid = os.getpid()
    return f"ortprep-{process_namespace()}-{pid}-{start_ticks(pid)}-{secrets.token_hex(4)}"


def segment_name(prefix: str, number: int) -> str:
    """Returns the name of a pool's segment."""
    return f"{prefix}-{number}"


def process_namespace() -> int:
    """Returns the namespace that process numbers here belong to; containers may share `/dev/shm`."""
    return _NAMESPACE.stat().st_ino


def start_ticks(pid: int) -> int:
    """Returns when a process was started, in clock ticks since boot; 0 if there is none of that number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def sweep_segments() -> None:
    """Removes what pools of processes that are gone have left, as far as this user may."""
    here = process_namespace()
    for path in _FOLDER.glob("ortprep-*"):
        found = _NAME.fullmatch(path.name)
        if found is None or int(found[1]) != here:
            continue
        if start_ticks(int(found[2])) != int(found[3]):
            with suppress(OSError):
                path.unlink()


class AttachedSegments:
    """A pool's segments as a worker sees them, mapped when they are first needed.

    Args:
        prefix: What their names begin with.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._maps: dict[int, NDArray[np.uint8]] = {}

    def bytes_of(self, span: Span) -> NDArray[np.uint8]:
        """Returns an array over a span.

        Raises:
            PoolError: It is not inside a segment of the pool.
        """
        whole = self._maps.get(span.segment)
        if whole is None:
            whole = self._maps[span.segment] = self._map(span.segment)
        if span.offset + span.size > len(whole):
            raise PoolError(f"span leaves its segment\n  expected at most {len(whole)} bytes, got {span}")
        return whole[span.offset : span.offset + span.size]

    def forget(self, number: int) -> None:
        """Unmaps a segment, as soon as no array is left on it."""
        self._maps.pop(number, None)

    def _map(self, number: int) -> NDArray[np.uint8]:
        # Not `SharedMemory`: before Python 3.13 it tells the resource tracker that this process owns it too.
        try:
            descriptor = os.open(_FOLDER / segment_name(self._prefix, number), os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PoolError(f"no shared memory segment {number}\n  {error.strerror}") from error
        try:
            return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        finally:
            os.close(descriptor)


def view_tensor(whole: NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Returns bytes as a tensor; they must be as many as it has."""
    if whole.size == 0:
        return np.empty(shape, dtype)
    return whole.view(dtype).reshape(shape)
