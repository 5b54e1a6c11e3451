"""Facts that are read of a machine; the rules judge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ortprep.runtime.machine.cgroups import ResourceLimits
from ortprep.runtime.machine.hardware import Gpu, Hardware


@dataclass(frozen=True)
class Wheel:
    """An installed distribution that brings the import package `onnxruntime`.

    Attributes:
        name: Its normalised name: `onnxruntime-gpu`.
        version: Its version.
    """

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class InstalledRuntime:
    """The ONNX Runtime that is imported, or the error of the import.

    Attributes:
        version: `onnxruntime.__version__`, "" if the import failed.
        package: The wheel it says it was built as, "" where it does not say.
        cuda_version: CUDA it was built with (`13.0`), "" for none.
        build_info: `onnxruntime.get_build_info()`.
        folder: Folder of the import package.
        available: Execution providers the wheel has code for; nothing says that they work.
        error: Why the import failed, None if it did not.
    """

    version: str = ""
    package: str = ""
    cuda_version: str = ""
    build_info: str = ""
    folder: str = ""
    available: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Provider:
    """An execution provider, tried on a model of one node.

    Attributes:
        name: `CUDAExecutionProvider`.
        usable: Whether a session on it was made and run.
        reason: Why not, "" if it was.
    """

    name: str
    usable: bool
    reason: str = ""


def short_name(provider: str) -> str:
    """Returns a provider's name without the words that all of them end in: `CUDA`."""
    return provider.removesuffix("ExecutionProvider")


@dataclass(frozen=True)
class Library:
    """A shared library that providers compute with.

    Attributes:
        name: As it is asked for: `libcublas.so.13`.
        needed_by: Providers that link to it, or open it when a model first needs it.
        package: Requirement of the wheel that brings it, None where no wheel does.
        file: The file it was loaded from, None if it was not found.
        version: What the library says of itself, None where it does not.
        error: Why it cannot be loaded, None if it can.
    """

    name: str
    needed_by: tuple[str, ...]
    package: str | None = None
    file: str | None = None
    version: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class PcieLink:
    """PCIe link of a GPU: now, and at most.

    Attributes:
        generation: PCIe generation in use; idle GPUs lower it to save power.
        width: Lanes in use.
        max_generation: What GPU and slot can do.
        max_width: What GPU and slot can do.
    """

    generation: int
    width: int
    max_generation: int
    max_width: int


@dataclass(frozen=True)
class GpuState:
    """A CUDA device and what NVIDIA's management library says of it.

    Attributes:
        device: As the CUDA driver describes it.
        free_bytes: Memory nobody uses, None where it is not told.
        persistence: Whether the driver keeps it initialised while nobody uses it, None where it is not told.
        link: Its PCIe link, None where it is not told.
    """

    device: Gpu
    free_bytes: int | None = None
    persistence: bool | None = None
    link: PcieLink | None = None


@dataclass(frozen=True)
class DiskSpace:
    """A file system.

    Attributes:
        path: A folder on it.
        total_bytes: Its size.
        free_bytes: What this user may still write.
    """

    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Facts:
    """Everything that is read of a machine.

    Attributes:
        wheels: Distributions of ONNX Runtime, in the order in which Python looks for them.
        runtime: The one that is imported.
        providers: Its providers, each tried in a process of its own.
        libraries: What the providers compute with.
        gpus: CUDA devices this process can use.
        bus_gpus: NVIDIA GPUs on the PCI bus, usable or not.
        driver: Version of NVIDIA's kernel driver, "" if none is loaded.
        hardware: Processor, cores and memory.
        limits: What this process may use of them.
        shared_memory: `/dev/shm`; its size is 0 if there is none.
        artifacts: The file system bundles are on.
        variables: Environment variables that change what is loaded.
    """

    wheels: tuple[Wheel, ...]
    runtime: InstalledRuntime
    providers: tuple[Provider, ...]
    libraries: tuple[Library, ...]
    gpus: tuple[GpuState, ...]
    bus_gpus: int
    driver: str
    hardware: Hardware
    limits: ResourceLimits
    shared_memory: DiskSpace
    artifacts: DiskSpace
    variables: Mapping[str, str] = field(default_factory=dict)
