"""Facts that are read of a machine; the rules judge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ortprep.runtime.machine.hardware import Gpu


@dataclass(frozen=True)
class Wheel:
    """An installed distribution that brings the import package `onnxruntime`.

    Attributes:
        name: Its normalised name: `onnxruntime-gpu`.
        version: Its version.
        location: Folder it is installed in.
    """

    name: str
    version: str
    location: str


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
        libraries: Files of libraries its process had mapped in the end, those it computes with only.
    """

    name: str
    usable: bool
    reason: str = ""
    libraries: tuple[str, ...] = ()


def short_name(provider: str) -> str:
    """Returns a provider's name without the words that all of them end in: `CUDA`."""
    return provider.removesuffix("ExecutionProvider")


@dataclass(frozen=True)
class Library:
    """A shared library that providers compute with.

    Attributes:
        name: As it is asked for: `libcublas.so.13`.
        linked_by: Providers that cannot even be loaded without it.
        opened_by: Providers that open it when a model first needs it.
        package: Requirement of the wheel that brings it, None where no wheel does.
        file: The file it was loaded from, None if it was not found.
        version: What the library says of itself, None where it does not.
        error: Why it cannot be loaded, None if it can.
    """

    name: str
    linked_by: tuple[str, ...]
    opened_by: tuple[str, ...] = ()
    package: str | None = None
    file: str | None = None
    version: str | None = None
    error: str | None = None

    @property
    def needed_by(self) -> tuple[str, ...]:
        """Every provider that computes with it."""
        return tuple(dict.fromkeys((*self.linked_by, *self.opened_by)))


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


@dataclass(frozen=True, order=True)
class Architecture:
    """A GPU architecture that code was compiled for.

    Attributes:
        major: Of the compute capability.
        minor: Of the compute capability.
        specific: Whether it runs on this very compute capability only (`sm_90a`).
    """

    major: int
    minor: int
    specific: bool = False


@dataclass(frozen=True)
class DeviceCode:
    """For which GPUs a provider library has code.

    Attributes:
        file: The library.
        native: Architectures it has machine code for.
        portable: Architectures it has PTX for, which the driver compiles at the first load.
    """

    file: str
    native: tuple[Architecture, ...]
    portable: tuple[Architecture, ...]


@dataclass(frozen=True)
class Processor:
    """The processor.

    Attributes:
        machine: `x86_64`.
        model: Its name, "" where the system does not tell.
        features: Instruction set flags by which ONNX Runtime chooses its kernels.
    """

    machine: str
    model: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class ResourceLimits:
    """Resources that this process may use.

    Attributes:
        cores: Logical processors it may run on.
        quota_cores: Processor time its control groups grant, in cores; None for no limit.
        periods: Scheduling periods in which the limited group wanted to run.
        throttled_periods: Those of them in which it was stopped for having used up its share.
        throttled_s: Seconds it was stopped in all.
        memory_bytes: Physical memory.
        memory_limit_bytes: Memory its control groups grant, None for no limit.
    """

    cores: int
    quota_cores: float | None
    periods: int
    throttled_periods: int
    throttled_s: float
    memory_bytes: int
    memory_limit_bytes: int | None


@dataclass(frozen=True)
class DiskSpace:
    """A file system.

    Attributes:
        path: Folder it was asked about.
        kind: `ext4`, `tmpfs`, `nfs4`; "" where the system does not tell.
        total_bytes: Its size.
        free_bytes: What this user may still write.
    """

    path: str
    kind: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class ReadSpeed:
    """Sequential read speed of a folder's files.

    Attributes:
        file: What was read: a file that was there, or "" for one written for the purpose.
        size_bytes: Bytes read from the page cache.
        warm_bytes_per_s: From the page cache.
        cold_bytes_per_s: From the disk, None where that could not be measured.
        obstacle: Why not, "" if it was.
    """

    file: str
    size_bytes: int
    warm_bytes_per_s: float
    cold_bytes_per_s: float | None
    obstacle: str = ""


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
        device_code: What the CUDA provider was compiled for, None where there is no such provider.
        processor: The processor.
        limits: What this process may use of it.
        shared_memory: `/dev/shm`, None if there is none.
        artifacts: The file system bundles are on.
        reading: How fast bundles are read, None where it could not be measured.
        variables: Environment variables that change what is loaded.
    """

    wheels: tuple[Wheel, ...]
    runtime: InstalledRuntime
    providers: tuple[Provider, ...]
    libraries: tuple[Library, ...]
    gpus: tuple[GpuState, ...]
    bus_gpus: int
    driver: str
    device_code: DeviceCode | None
    processor: Processor
    limits: ResourceLimits
    shared_memory: DiskSpace | None
    artifacts: DiskSpace
    reading: ReadSpeed | None
    variables: Mapping[str, str] = field(default_factory=dict)
