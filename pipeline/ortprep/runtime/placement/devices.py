"""Devices of a pool: `cpu`, `cuda:0`, …; what "all" means here, and what a process on one of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ortprep.errors import PoolError
from ortprep.runtime.machine.hardware import Hardware


@dataclass(frozen=True)
class Device:
    """A place for workers.

    Attributes:
        kind: `cpu` or `cuda`.
        ordinal: CUDA ordinal as this process sees it; 0 for the CPU.
        memory_bytes: Memory of the GPU, or of the machine; None if unknown.
    """

    kind: Literal["cpu", "cuda"]
    ordinal: int = 0
    memory_bytes: int | None = None

    @property
    def name(self) -> str:
        """As users write it."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.ordinal}"


def resolve_devices(requested: str | Sequence[str], hardware: Hardware) -> tuple[Device, ...]:
    """Returns the devices that were named.

    Args:
        requested: `all` (every GPU, or the CPU where there is none), one device, or several.
        hardware: The machine.

    Raises:
        PoolError: A name is not a device, is named twice, or is not on this machine.
    """
    gpus = tuple(Device("cuda", n, gpu.memory_bytes) for n, gpu in enumerate(hardware.gpus))
    cpu = Device("cpu", 0, hardware.memory_bytes)
    names = (requested,) if isinstance(requested, str) else tuple(requested)
    if names == ("all",):
        return gpus or (cpu,)
    by_name = {device.name: device for device in (cpu, *gpus)}
    offered = ", ".join(by_name)
    if not names or len(set(names)) != len(names):
        raise PoolError(
            f"bad devices: {list(names)}\n  expected each once, of {offered}",
            hint="PoolConfig(workers_per_device=2) for several workers on one",
        )
    for name in names:
        if name not in by_name:
            raise PoolError(
                f"no such device on this machine: {name!r}\n  expected all, or some of {offered}",
                hint="nvidia-smi -L",
            )
    return tuple(by_name[name] for name in names)


def device_variables(device: Device, visible: str | None) -> dict[str, str]:
    """Returns variables of the environment of a process that works on one device and sees no other GPU.

    Args:
        device: The device. In the process, a GPU has CUDA ordinal 0.
        visible: `CUDA_VISIBLE_DEVICES` of this process; None if it is not set.
    """
    if device.kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}  # else a bundle that prefers CUDA would have it
    names = [name.strip() for name in visible.split(",")] if visible else []
    token = names[device.ordinal] if device.ordinal < len(names) else str(device.ordinal)
    return {"CUDA_VISIBLE_DEVICES": token, "CUDA_MODULE_LOADING": "LAZY"}
