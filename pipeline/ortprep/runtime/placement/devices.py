"""Devices of a pool (`cpu`, `cuda:0`, …), and what surrounds each worker there.

That is its environment, its share of the threads and the processors it is kept to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ortprep.errors import PoolError
from ortprep.runtime.machine.hardware import Hardware

_NODES = Path("/sys/devices/system/node")


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


@dataclass(frozen=True)
class WorkerEnvironment:
    """Where and how one worker runs.

    Attributes:
        device_id: CUDA ordinal inside the worker, which sees its own GPU alone; None on the CPU.
        threads: Most threads of each kind that a session may have; None leaves what is recorded.
        processors: Processors it is kept to; None for all.
    """

    device: Device
    device_id: int | None
    variables: Mapping[str, str]
    threads: int | None
    may_spin: bool
    processors: tuple[int, ...] | None


def plan_environments(
    devices: Sequence[Device],
    *,
    workers_per_device: int,
    processors: Sequence[int],
    nodes: Sequence[Sequence[int]],
    visible: str | None,
    threads: int | None = None,
) -> tuple[WorkerEnvironment, ...]:
    """Divides a machine among workers, device by device; `threads` is the most that a session of each has."""
    count = len(devices) * workers_per_device
    usable = [tuple(sorted(set(node) & set(processors))) for node in nodes]
    usable = [node for node in usable if node]
    environments = []
    for index in range(count):
        device = devices[index // workers_per_device]
        # Several nodes: a worker stays on one, since memory of another is slower. One: the kernel decides.
        node = usable[index * len(usable) // count] if len(usable) > 1 and count > 1 else None
        environments.append(
            WorkerEnvironment(
                device=device,
                device_id=None if device.kind == "cpu" else 0,
                variables=_variables(device, visible),
                threads=threads,
                may_spin=count == 1,
                processors=node,
            )
        )
    return tuple(environments)


def _variables(device: Device, visible: str | None) -> dict[str, str]:
    if device.kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}  # else a bundle that prefers CUDA would have it
    names = [name.strip() for name in visible.split(",")] if visible else []
    token = names[device.ordinal] if device.ordinal < len(names) else str(device.ordinal)
    return {"CUDA_VISIBLE_DEVICES": token, "CUDA_MODULE_LOADING": "LAZY"}


def read_numa_nodes() -> tuple[tuple[int, ...], ...]:
    """Returns the processors of every NUMA node; nothing if the system lists none."""
    nodes = []
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        with suppress(OSError, ValueError):
            nodes.append(parse_processors((folder / "cpulist").read_text(encoding="ascii")))
    return tuple(node for node in nodes if node)


def parse_processors(text: str) -> tuple[int, ...]:
    """Returns the numbers of a list as the kernel writes it: `0-3,8`."""
    numbers: list[int] = []
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers.extend(range(int(low), int(high or low) + 1))
    return tuple(numbers)
