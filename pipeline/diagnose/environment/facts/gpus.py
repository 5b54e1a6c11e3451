"""State of the GPUs, from NVIDIA's management library if it is there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ortprep.diagnose.environment.facts.cgroups import read_text
from ortprep.diagnose.environment.facts.records import GpuState, PcieLink
from ortprep.runtime.machine.gpu_memory import find_device, management_library, read_memory
from ortprep.runtime.machine.hardware import Gpu

_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers; the same card's sound device is neither


def read_gpu_states(gpus: Sequence[Gpu], library: Any = None) -> tuple[GpuState, ...]:
    """Returns CUDA devices with their memory, persistence mode and PCIe link."""
    if not gpus:
        return ()
    with management_library(library) as management:
        if management is None:
            return tuple(GpuState(gpu) for gpu in gpus)
        return tuple(_read_state(management, gpu) for gpu in gpus)


def count_bus_gpus(sys: Path = Path("/sys")) -> int:
    """Returns how many NVIDIA GPUs the kernel sees on the PCI bus, with a driver or without."""
    devices = sys / "bus/pci/devices"
    try:
        folders = list(devices.iterdir())
    except OSError:
        return 0
    return sum(
        read_text(folder / "vendor") == _NVIDIA and read_text(folder / "class").startswith(_DISPLAY_CLASSES)
        for folder in folders
    )


def read_driver_version(sys: Path = Path("/sys")) -> str:
    """Returns the version of NVIDIA's kernel driver, "" if none is loaded."""
    return read_text(sys / "module/nvidia/version")


def _read_state(management: Any, gpu: Gpu) -> GpuState:
    device = find_device(management, gpu.uuid)
    if device is None:
        return GpuState(gpu)
    memory = read_memory(management, device)
    whole = _whole_gpu(management, device)
    persistence = _read_number(management.nvmlDeviceGetPersistenceMode, whole)
    return GpuState(
        device=gpu,
        free_bytes=None if memory is None else memory.free_bytes,
        persistence=None if persistence is None else persistence == 1,
        link=_read_link(management, whole),
    )


def _whole_gpu(management: Any, device: ctypes.c_void_p) -> ctypes.c_void_p:
    """A slice has neither a link nor a persistence mode of its own: its GPU has."""
    whole = ctypes.c_void_p()
    failed = management.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device, ctypes.byref(whole))
    return device if failed else whole


def _read_link(management: Any, device: ctypes.c_void_p) -> PcieLink | None:
    numbers = [
        _read_number(read, device)
        for read in (
            management.nvmlDeviceGetCurrPcieLinkGeneration,
            management.nvmlDeviceGetCurrPcieLinkWidth,
            management.nvmlDeviceGetMaxPcieLinkGeneration,
            management.nvmlDeviceGetMaxPcieLinkWidth,
        )
    ]
    answers = [number for number in numbers if number is not None]
    return PcieLink(*answers) if len(answers) == len(numbers) else None


def _read_number(read: Any, device: ctypes.c_void_p) -> int | None:
    number = ctypes.c_uint(0)
    return int(number.value) if read(device, ctypes.byref(number)) == 0 else None
