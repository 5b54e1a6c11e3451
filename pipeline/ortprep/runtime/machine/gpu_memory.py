"""GPU memory, as NVIDIA's management library (NVML) reports it."""

from __future__ import annotations

import ctypes


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_gpu_bytes(uuid: str) -> int | None:
    """Returns the memory in use on a GPU, by all processes together.

    A container often cannot see its processes' share, so a caller that holds the device to itself takes the
    difference of two readings.

    Returns:
        Bytes, or None where there is no management library or it does not list the GPU.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        return None
    try:
        return _read_used_bytes(library, uuid)
    finally:
        library.nvmlShutdown()


def _read_used_bytes(library: ctypes.CDLL, uuid: str) -> int | None:
    device, memory = ctypes.c_void_p(), _Memory()
    # CUDA gives a MIG slice's identifier bare; this library needs the kind as a prefix.
    for name in (uuid, uuid.replace("GPU-", "MIG-")):
        if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)) == 0:
            is_read = library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
            return int(memory.used) if is_read else None
    return None
