"""GPU memory, as NVIDIA's management library reports it, and that library for further questions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU, or of a slice of one; bytes."""

    free_bytes: int
    used_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_gpu_bytes(uuid: str) -> int | None:
    """Returns the memory in use on a GPU, by all processes together.

    A container often cannot see its processes' share, so a caller that holds the device to itself takes the
    difference of two readings.

    Returns:
        Bytes, or None where there is no management library or it does not list the GPU.
    """
    with management_library() as library:
        device = None if library is None else find_device(library, uuid)
        memory = None if device is None else read_memory(library, device)
    return None if memory is None else memory.used_bytes


@contextmanager
def management_library(library: Any = None) -> Iterator[Any]:
    """Gives NVIDIA's management library (NVML), initialised while the block runs, or None without one."""
    try:
        loaded = ctypes.CDLL("libnvidia-ml.so.1") if library is None else library
    except OSError:
        yield None
        return
    if loaded.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield loaded
    finally:
        loaded.nvmlShutdown()


def find_device(library: Any, uuid: str) -> ctypes.c_void_p | None:
    """Returns the library's handle of a GPU or of a slice of one, None if it does not list it."""
    device = ctypes.c_void_p()
    # CUDA gives a MIG slice's identifier bare; this library needs the kind as a prefix.
    for name in (uuid, uuid.replace("GPU-", "MIG-")):
        if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)) == 0:
            return device
    return None


def read_memory(library: Any, device: ctypes.c_void_p) -> GpuMemory | None:
    """Returns the memory of what `find_device` found, None if the library has no figures."""
    memory = _Memory()
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
        return None
    return GpuMemory(int(memory.free), int(memory.used))
