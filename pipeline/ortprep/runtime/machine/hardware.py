"""What this machine is: processor, instruction set, usable cores, memory and GPUs."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import platform
from collections.abc import Iterable
from typing import Any, NamedTuple

from ortprep.runtime.machine.processor import CPUID_BITS, read_cpuid, read_text

_CPUINFO = "/proc/cpuinfo"
_DRIVER_VERSION = "/sys/module/nvidia/version"

_ARM_FEATURES = ("asimd", "asimddp", "asimdhp", "fphp", "i8mm", "bf16", "sve", "sve2", "sme")
KERNEL_FEATURES = frozenset((*CPUID_BITS, *_ARM_FEATURES))
"""Flags by which ONNX Runtime's CPU kernels choose their code."""

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76


class Gpu(NamedTuple):
    """A CUDA device, at its CUDA ordinal.

    Attributes:
        name: As the driver names it.
        compute_capability: (major, minor).
        memory_bytes: Total device memory.
        driver_version: Version of the kernel driver (`580.65.06`), "" where it is unknown.
        cuda_version: Newest CUDA the driver serves (`13.0`).
        uuid: `GPU-…`, the name NVML knows it by.
    """

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    driver_version: str
    cuda_version: str
    uuid: str


class Hardware(NamedTuple):
    """What requirements are compared with and measurements are recorded beside.

    Attributes:
        machine: `platform.machine()`.
        cpu_model: Processor's name, "" if the system has none.
        cpu_features: Flags as `/proc/cpuinfo` spells them, sorted.
        cores: Logical processors this process may run on.
        memory_bytes: Physical memory.
        gpus: CUDA devices by ordinal, `CUDA_VISIBLE_DEVICES` honoured.
    """

    machine: str
    cpu_model: str
    cpu_features: tuple[str, ...]
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()


@functools.cache
def read_hardware(*, gpus: bool = True) -> Hardware:
    """Reads this machine's hardware once per process; it does not change while one runs.

    Args:
        gpus: Whether to query the CUDA driver too, which takes a fraction of a second where there is one.
    """
    cpu_model, features = parse_cpuinfo(_read_first_processor())
    return Hardware(
        machine=platform.machine(),
        cpu_model=cpu_model,
        cpu_features=tuple(sorted(_correct_features(features))),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=read_gpus() if gpus else (),
    )


def nchwc_block_size(hardware: Hardware) -> int:
    """Returns how many channels ONNX Runtime's CPU convolutions pack into one block on this machine.

    A graph with `com.microsoft.nchwc` nodes answers only where this equals the size it was written with
    (microsoft/onnxruntime #26174): 16 with AVX-512, 8 with AVX; 1 means that such nodes are not made.
    """
    features = frozenset(hardware.cpu_features)
    if {"avx512f", "avx2", "fma"} <= features:
        return 16
    if "avx" in features:
        return 8
    return 16 if hardware.machine in ("aarch64", "arm64") else 1


def hardware_fingerprint(target: str, hardware: Hardware | None = None) -> dict[str, Any]:
    """Returns what of a machine decides how a model is best prepared for `target`, as JSON types.

    Args:
        target: `cpu` or `cuda`.
        hardware: The machine; this one if None.
    """
    machine = hardware or read_hardware(gpus=target == "cuda")
    fingerprint: dict[str, Any] = {
        "machine": machine.machine,
        "cpu_features": [flag for flag in machine.cpu_features if flag in KERNEL_FEATURES],
        "cores": machine.cores,
    }
    if target == "cuda":
        fingerprint["gpus"] = [
            {
                "name": gpu.name,
                "compute_capability": list(gpu.compute_capability),
                "driver": gpu.driver_version,
                "cuda": gpu.cuda_version,
            }
            for gpu in machine.gpus
        ]
    return fingerprint


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Returns the processor's name and flags from the text of `/proc/cpuinfo`, x86 or Arm."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name", ""), frozenset(flags.split())


def _read_first_processor() -> str:
    """Reads the first block of `/proc/cpuinfo`; writing all of them takes the kernel long on many cores."""
    try:
        with open(_CPUINFO, encoding="utf-8", errors="replace") as lines:
            return "".join(itertools.takewhile(str.strip, lines))
    except OSError:
        return ""


def _correct_features(listed: Iterable[str]) -> frozenset[str]:
    """Takes the processor's own word for the flags that matter, where the C library passes it on."""
    usable = read_cpuid()
    if usable is None:
        return frozenset(listed)
    active = {name for name, (leaf, register, bit) in CPUID_BITS.items() if usable[leaf][register] >> bit & 1}
    return (frozenset(listed) - CPUID_BITS.keys()) | active


def read_gpus() -> tuple[Gpu, ...]:
    """Returns the CUDA devices this process can use, in CUDA's order; none where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_read_gpu(driver, ordinal) for ordinal in range(count.value))


def _read_gpu(driver: ctypes.CDLL, ordinal: int) -> Gpu:
    """Reads what CUDA's driver says of a device."""
    device = ctypes.c_int(0)
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), device)
    memory_bytes = ctypes.c_size_t(0)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory_bytes), device)
    return Gpu(
        name=name.value.decode(errors="replace"),
        compute_capability=(
            _read_attribute(driver, device, _COMPUTE_CAPABILITY_MAJOR),
            _read_attribute(driver, device, _COMPUTE_CAPABILITY_MINOR),
        ),
        memory_bytes=memory_bytes.value,
        driver_version=read_text(_DRIVER_VERSION),
        cuda_version=_read_cuda_version(driver),
        uuid=_read_uuid(driver, device),
    )


def _read_attribute(driver: ctypes.CDLL, device: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int(0)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value


def _read_cuda_version(driver: ctypes.CDLL) -> str:
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _read_uuid(driver: ctypes.CDLL, device: ctypes.c_int) -> str:
    raw = (ctypes.c_ubyte * 16)()
    # The second version names a MIG slice itself where the first names the whole GPU. Drivers before CUDA
    # 11.4 lack it; a load beside one takes a variant for the CPU.
    read = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    read(raw, device)
    text = bytes(raw).hex()
    return "GPU-" + "-".join(text[start:end] for start, end in itertools.pairwise((0, 8, 12, 16, 20, 32)))
