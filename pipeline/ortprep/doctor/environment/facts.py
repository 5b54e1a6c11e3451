"""Everything that is read of a machine; the rules judge it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from ortprep.doctor.diagnosis import Rules
from ortprep.doctor.environment.ort_probe import InstalledRuntime, read_runtime, try_providers
from ortprep.runtime.machine.cgroups import ResourceLimits, read_limits
from ortprep.runtime.machine.cores import read_text
from ortprep.runtime.machine.hardware import Gpu, Hardware, read_hardware
from ortprep.tables import CellValue
from ortprep.telemetry import TELEMETRY_VARIABLE

_ROOT, _SHARED_MEMORY = Path("/"), Path("/dev/shm")
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE"),
    *("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", TELEMETRY_VARIABLE),
)
"""Environment variables that change which libraries are loaded, what is seen, compiled or sent."""

_WHEEL_NAMES = re.compile(r"(onnxruntime|ort)([-_.][a-z0-9-_.]+)?", re.IGNORECASE)
_OWNED = "onnxruntime/__init__.py"
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers; the same card's sound device is neither
_SMI = ("nvidia-smi", "--query-gpu=uuid,memory.free,persistence_mode", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class GpuState:
    """A CUDA device and what NVIDIA's management library says of it.

    Attributes:
        device: As the CUDA driver describes it.
        free_bytes: Memory nobody uses, None where it is not told.
        persistence: Whether the driver keeps it initialised while nobody uses it, None where it is not told.
    """

    device: Gpu
    free_bytes: int | None = None
    persistence: bool | None = None


@dataclass(frozen=True)
class DiskSpace:
    """A file system.

    Attributes:
        path: A folder on it.
        total_bytes: Its size.
        free_bytes: What this user may still write.
    """

    path: str
    total_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class Facts:
    """A machine, and what is expected of it.

    Attributes:
        wheels: Versions of the distributions that bring the import package `onnxruntime`, by normalised name.
        runtime: The ONNX Runtime that is imported.
        providers: Why each of its providers cannot be used, None for one that can.
        gpus: CUDA devices this process can use.
        bus_gpus: NVIDIA GPUs on the PCI bus, usable or not.
        driver: Version of NVIDIA's kernel driver, "" if none is loaded.
        hardware: Processor, cores and memory.
        limits: What this process may use of them.
        shared_memory: `/dev/shm`; its size is 0 if there is none.
        artifacts: The file system bundles are on.
        variables: Environment variables that change what is loaded.
        expected: Full names of the execution providers that were asked for.
    """

    wheels: Mapping[str, str]
    runtime: InstalledRuntime
    providers: Mapping[str, str | None]
    gpus: tuple[GpuState, ...]
    bus_gpus: int
    driver: str
    hardware: Hardware
    limits: ResourceLimits
    shared_memory: DiskSpace
    artifacts: DiskSpace
    variables: Mapping[str, str] = field(default_factory=dict)
    expected: tuple[str, ...] = ()

    @property
    def has_gpu(self) -> bool:
        """Whether there is an NVIDIA GPU, usable or not."""
        return bool(self.gpus or self.bus_gpus)


Row: TypeAlias = tuple[CellValue, ...]
"""A row of a topic's table."""

rule: Rules[Facts] = Rules()
"""Makes a function a rule about a machine."""


def read_facts(
    *,
    artifacts: Path,
    expected: Sequence[str] = (),
    root: Path = _ROOT,
    shared_memory: Path = _SHARED_MEMORY,
) -> Facts:
    """Reads everything the rules judge; makes a session on every provider.

    Args:
        artifacts: Folder of the bundles, there or not.
        expected: Full names of the execution providers that were asked for.
        root: Folder in which `proc` and `sys` are.
        shared_memory: Where shared memory is kept.

    Raises:
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    hardware, runtime = read_hardware(), read_runtime()
    has_shared_memory = shared_memory.is_dir()
    return Facts(
        wheels=read_wheels(),
        runtime=runtime,
        providers=try_providers(runtime.available),
        gpus=read_gpu_states(hardware.gpus),
        bus_gpus=count_bus_gpus(root / "sys"),
        driver=read_text(f"{root}/sys/module/nvidia/version"),
        hardware=replace(hardware, gpus=()),
        limits=read_limits(root),
        shared_memory=read_disk_space(shared_memory) if has_shared_memory else DiskSpace("/dev/shm"),
        artifacts=read_disk_space(artifacts.absolute()),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        expected=tuple(expected),
    )


def read_wheels() -> dict[str, str]:
    """Returns the distributions that own the import package `onnxruntime`, where Python finds it first.

    Others begin with the same word and own packages of their own, as `onnxruntime-extensions`.
    """
    found = list(_find_wheels())
    return {name: version for folder, name, version in found if folder == found[0][0]}


def _find_wheels() -> Iterator[tuple[str, str, str]]:
    """Yields folder, name and version of every distribution that owns the package."""
    # Not `metadata.distributions`, which asks finders that packages put in Python's place, as the backport
    # importlib_metadata does where it is imported: those leave out files that are not there.
    context = metadata.DistributionFinder.Context(path=sys.path)
    for distribution in metadata.MetadataPathFinder.find_distributions(context):
        try:
            name = distribution.metadata["Name"] or ""
        except FileNotFoundError:
            continue  # a folder left half deleted
        files = distribution.files  # None of conda and distributions of Linux, which keep no list
        is_owner = name == "onnxruntime" if files is None else any(str(file) == _OWNED for file in files)
        if _WHEEL_NAMES.fullmatch(name) and is_owner:
            normalised = re.sub(r"[-_.]+", "-", name).lower()
            yield str(distribution.locate_file("")), normalised, distribution.version


def read_disk_space(folder: Path) -> DiskSpace:
    """Reads the size of the file system that a folder is on, or will be on once it is made."""
    usage = shutil.disk_usage(next(level for level in (folder, *folder.parents) if level.is_dir()))
    return DiskSpace(str(folder), usage.total, usage.free)


def read_gpu_states(gpus: Sequence[Gpu]) -> tuple[GpuState, ...]:
    """Returns CUDA devices with their free memory and persistence mode, as far as `nvidia-smi` tells."""
    text = ""
    try:
        if gpus:
            done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
            text = done.stdout
    except (OSError, subprocess.SubprocessError):
        pass
    rows = {uuid: told for uuid, *told in (re.split(r"\s*,\s*", line.strip()) for line in text.splitlines())}
    return tuple(_parse_state(gpu, rows.get(gpu.uuid, [])) for gpu in gpus)


def _parse_state(gpu: Gpu, told: Sequence[str]) -> GpuState:
    free_mib, mode = told if len(told) == 2 else ("", "")
    free_bytes = int(free_mib) * 2**20 if free_mib.isdigit() else None
    return GpuState(gpu, free_bytes, {"Enabled": True, "Disabled": False}.get(mode))


def count_bus_gpus(sys: Path = Path("/sys")) -> int:
    """Returns how many NVIDIA GPUs the kernel sees on the PCI bus, with a driver or without."""
    devices = sys / "bus/pci/devices"
    folders = devices.iterdir() if devices.is_dir() else ()
    return sum(
        read_text(f"{folder}/vendor") == _NVIDIA and read_text(f"{folder}/class").startswith(_DISPLAY_CLASSES)
        for folder in folders
    )
