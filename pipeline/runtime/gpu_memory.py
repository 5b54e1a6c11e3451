"""GPU memory in use, as NVIDIA's management library reports it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_gpu_bytes(uuid: str) -> int | None:
    """Returns the memory in use on a GPU, by all processes together.

    A container often cannot see its processes' share, so a caller that holds the device to itself takes the
    difference of two readings.

    Args:
        uuid: `GPU-…`, as `Gpu.uuid` gives it.

    Returns:
        Bytes, or None where there is no management library or it does not know the GPU.
    """
    with _management_library() as library:
        if library is None:
            return None
        device, memory = ctypes.c_void_p(), _Memory()
        # CUDA gives a MIG slice's identifier bare; this library wants to know what it identifies.
        names = (uuid, uuid.replace("GPU-", "MIG-"))
        if all(library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)) for name in names):
            return None
        if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
            return None
        return int(memory.used)


@contextmanager
def _management_library() -> Iterator[ctypes.CDLL | None]:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()
