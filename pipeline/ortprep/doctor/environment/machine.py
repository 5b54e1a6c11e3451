"""GPUs, processor, limits and disk: the rows that show them, and what is found of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ortprep.doctor.diagnosis import Finding, Severity, format_bytes
from ortprep.doctor.environment.facts import DiskSpace, Facts, Row
from ortprep.doctor.environment.runtime import install_cuda
from ortprep.quoting import quoted
from ortprep.runtime.loading.session import CUDA
from ortprep.runtime.machine.hardware import KERNEL_FEATURES
from ortprep.versions import parse_version

MIN_SHARED_BYTES = 64 * 1024 * 1024
"""Default size in container engines; a pool's tensors do not fit."""

MIN_SPACE_BYTES = MIN_MEMORY_BYTES = 1024**3
LOW_SPACE_BYTES = 5 * MIN_SPACE_BYTES
_THROTTLED_SHARE = 0.01

_HIDING = "CUDA_VISIBLE_DEVICES"
_LOOK_FOR_GPUS = "nvidia-smi  (in a container: docker run --gpus all …, which brings libcuda.so.1)"
_LOOK_FOR_AVX2 = (
    "lscpu | grep -o 'avx[^ ]*'  (a virtual machine may hide it: give it the host's processor model)"
)


def gpu_rows(facts: Facts) -> Iterator[Row]:
    """Yields every GPU."""
    for ordinal, gpu in enumerate(facts.gpus):
        capability = ".".join(map(str, gpu.compute_capability))
        yield f"{ordinal} {gpu.name}", round(gpu.memory_bytes / 1e9, 1), capability


def find_missing_gpus(facts: Facts) -> Iterator[Finding]:
    """Yields why GPUs of the machine cannot be used, or that there are none though CUDA was requested."""
    count, is_hiding, is_expected = facts.bus_gpus, _HIDING in facts.variables, CUDA in facts.expected
    if is_hiding and len(facts.gpus) < count:
        severity: Severity = "problem" if not facts.gpus and is_expected else "note"
        text = f"{len(facts.gpus)} of {count} GPUs can be used: {_HIDING}={facts.variables[_HIDING]!r}"
        yield Finding("gpus-hidden", severity, text, f"unset {_HIDING}")
    if count and not facts.gpus and not is_hiding:
        loaded = f"the driver {facts.driver} is loaded, but CUDA gives no access to it"
        reason = loaded if facts.driver else "no NVIDIA driver is loaded"
        text = f"{count} NVIDIA GPU(s) on the PCI bus, but none of them can be used: {reason}"
        yield Finding("gpu-without-driver", "problem", text, _LOOK_FOR_GPUS)
    if is_expected and not facts.has_gpu:
        text = "CUDA was asked for, but neither the PCI bus nor the CUDA driver shows a GPU"
        yield Finding("no-gpu", "problem", text, _LOOK_FOR_GPUS)


def find_in_gpus(facts: Facts) -> Iterator[Finding]:
    """Yields what keeps GPUs that are there from being used, or used well."""
    if not facts.gpus:
        return
    runtime, device = facts.runtime, facts.gpus[0]
    if runtime.version and CUDA not in runtime.available:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in facts.gpus))
        wheel = f"{runtime.package or 'the wheel'} {runtime.version}"
        text = f"{len(facts.gpus)} GPU(s) here ({names}), and {wheel} has no code for CUDA"
        severity: Severity = "problem" if CUDA in facts.expected else "advice"
        yield Finding("gpu-unused", severity, text, install_cuda(facts))
    built, served = parse_version(runtime.cuda_version), parse_version(device.cuda_version)
    if built is not None and served is not None and served[0] < built[0]:
        text = (
            f"driver {device.driver_version} serves CUDA up to {device.cuda_version}, "
            f"and ONNX Runtime {runtime.version} was built with {runtime.cuda_version}"
        )
        hint = f"update the NVIDIA driver, or install an ONNX Runtime built with CUDA {served[0]:d}"
        yield Finding("driver-too-old", "problem", text, hint)


def machine_rows(facts: Facts) -> Iterator[Row]:
    """Yields processor, limits, memory and disk."""
    hardware, limits = facts.hardware, facts.limits
    yield "processor", hardware.cpu_model or hardware.machine
    yield "instruction sets", " ".join(flag for flag in hardware.cpu_features if flag in KERNEL_FEATURES)
    granted = "no limit" if limits.quota_cores is None else f"the time of {limits.quota_cores:.3g} granted"
    yield "cores", f"{hardware.cores} ({granted})"
    if limits.quota_cores is not None:
        yield "throttled periods", f"{limits.throttled_periods} of {limits.periods}"
    bounded = "no limit" if limits.memory_bytes is None else f"{format_bytes(limits.memory_bytes)} granted"
    yield "memory", f"{format_bytes(hardware.memory_bytes)} ({bounded})"
    yield "/dev/shm", _describe_space(facts.shared_memory)
    yield "bundles", _describe_space(facts.artifacts)


def _describe_space(space: DiskSpace) -> str:
    return f"{format_bytes(space.free_bytes)} of {format_bytes(space.total_bytes)} free: {space.path}"


def find_in_processor(facts: Facts) -> Iterator[Finding]:
    """Yields what makes the processor slow: missing instructions, or a quota below its cores."""
    hardware, limits = facts.hardware, facts.limits
    if hardware.machine in ("x86_64", "AMD64") and "avx2" not in hardware.cpu_features:
        name = hardware.cpu_model or "the processor"
        text = f"{name} shows no AVX2: ONNX Runtime's CPU kernels fall back to code several times slower"
        yield Finding("no-avx2", "advice", text, _LOOK_FOR_AVX2)
    quota, cores = limits.quota_cores, hardware.cores
    if quota is not None and cores > math.ceil(quota):
        text = (
            f"ONNX Runtime sees {cores} processors and chooses its threads by them; the control group "
            f"grants the time of {quota:.3g}, and all threads stop when that is used up"
        )
        hint = (
            f"runtime: {{intra_op_num_threads: {max(1, math.floor(quota)):d}}} in the spec; "
            "ortprep doctor parallel MODEL measures what it costs"
        )
        yield Finding("cores-above-quota", "advice", text, hint)
    if stopped := limits.throttled_periods:
        share = stopped / max(limits.periods, stopped)
        text = (
            f"the control group was stopped in {stopped} of {limits.periods} scheduling periods "
            f"({share:.0%}), because its processor time was used up"
        )
        hint = "a higher limit (docker run --cpus=…, resources.limits.cpu), or fewer intra_op_num_threads"
        yield Finding("cpu-throttled", "advice" if share >= _THROTTLED_SHARE else "note", text, hint)


def find_in_memory(facts: Facts) -> Iterator[Finding]:
    """Yields where memory or disk space is little."""
    memory, installed = facts.limits.memory_bytes, facts.hardware.memory_bytes
    if memory is not None and memory < min(MIN_MEMORY_BYTES, installed):
        granted = f"{format_bytes(memory)} of {format_bytes(installed)} of memory"
        text = f"the control group grants {granted}; a session that needs more is killed"
        hint = "docker run --memory=…, or resources.limits.memory of the pod"
        yield Finding("memory-limited", "advice", text, hint)
    room = facts.shared_memory
    if room.total_bytes <= MIN_SHARED_BYTES:
        text = (
            f"{room.path} is {format_bytes(room.total_bytes)}, as container engines make it: "
            "Ray keeps objects there (SessionPool does not need it)"
        )
        hint = "docker run --shm-size=8g …  (Kubernetes: an emptyDir with medium: Memory at /dev/shm)"
        yield Finding("small-shared-memory", "advice", text, hint)
    room = facts.artifacts
    if room.free_bytes < LOW_SPACE_BYTES:
        text = (
            f"{format_bytes(room.free_bytes)} free where bundles are kept ({room.path}); a build needs "
            "several times the size of a model"
        )
        severity: Severity = "problem" if room.free_bytes < MIN_SPACE_BYTES else "advice"
        yield Finding("low-space", severity, text, quoted("df", "-h", room.path))
