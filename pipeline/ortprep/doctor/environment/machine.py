"""GPUs, processor, limits and disk: the rows that show them, and the rules that judge them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ortprep.doctor.diagnosis import Found, format_bytes
from ortprep.doctor.environment.facts import DiskSpace, Facts, Row, rule
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

_HIDING, _LOADING = "CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING"

# GPUs and their driver.


def gpu_rows(facts: Facts) -> Iterator[Row]:
    """Yields every GPU."""
    for ordinal, state in enumerate(facts.gpus):
        device = state.device
        yield (
            f"{ordinal} {device.name}",
            round(device.memory_bytes / 1e9, 1),
            None if state.free_bytes is None else round(state.free_bytes / 1e9, 1),
            ".".join(map(str, device.compute_capability)),
            None if state.persistence is None else "on" if state.persistence else "off",
        )


@rule("gpus-hidden", "note", hint=f"unset {_HIDING}")
def _hidden_gpus(facts: Facts) -> Iterator[Found]:
    if _HIDING in facts.variables and len(facts.gpus) < facts.bus_gpus:
        shown = f"{_HIDING}={facts.variables[_HIDING]!r}"
        text = f"{len(facts.gpus)} of {facts.bus_gpus} GPUs can be used: {shown}"
        yield Found(text, severity="problem" if not facts.gpus and CUDA in facts.expected else None)


@rule(
    "gpu-without-driver",
    "problem",
    hint="nvidia-smi  (in a container: docker run --gpus all …, which brings libcuda.so.1)",
)
def _no_driver(facts: Facts) -> Iterator[str]:
    if facts.bus_gpus and not facts.gpus and _HIDING not in facts.variables:
        loaded = f"the driver {facts.driver} is loaded, but CUDA gives no access to it"
        reason = loaded if facts.driver else "no NVIDIA driver is loaded"
        yield f"{facts.bus_gpus} NVIDIA GPU(s) on the PCI bus, but none of them can be used: {reason}"


@rule("no-gpu", "problem", hint="nvidia-smi  (in a container: docker run --gpus all …)")
def _no_gpu(facts: Facts) -> Iterator[str]:
    if CUDA in facts.expected and not facts.has_gpu:
        yield "CUDA was asked for, but neither the PCI bus nor the CUDA driver shows a GPU"


@rule("gpu-unused", "advice")
def _unused_gpu(facts: Facts) -> Iterator[Found]:
    if facts.gpus and facts.runtime.version and CUDA not in facts.runtime.available:
        names = ", ".join(dict.fromkeys(state.device.name for state in facts.gpus))
        wheel = f"{facts.runtime.package or 'the wheel'} {facts.runtime.version}"
        text = f"{len(facts.gpus)} GPU(s) here ({names}), and {wheel} has no code for CUDA"
        yield Found(text, install_cuda(facts), "problem" if CUDA in facts.expected else None)


@rule(
    "eager-module-loading",
    "advice",
    hint=f"unset {_LOADING}  (CUDA has loaded lazily by itself since 12.2)",
)
def _eager_loading(facts: Facts) -> Iterator[str]:
    if facts.gpus and facts.variables.get(_LOADING, "").upper() == "EAGER":
        yield f"{_LOADING}=EAGER loads every kernel of every library at start, used or not"


@rule("driver-too-old", "problem")
def _old_driver(facts: Facts) -> Iterator[Found]:
    built = parse_version(facts.runtime.cuda_version)
    served = parse_version(facts.gpus[0].device.cuda_version) if facts.gpus else None
    if built is not None and served is not None and served[0] < built[0]:
        device, runtime = facts.gpus[0].device, facts.runtime
        text = (
            f"driver {device.driver_version} serves CUDA up to {device.cuda_version}, "
            f"and ONNX Runtime {runtime.version} was built with {runtime.cuda_version}"
        )
        hint = f"update the NVIDIA driver, or install an ONNX Runtime built with CUDA {served[0]:d}"
        yield Found(text, hint)


@rule("gpu-persistence-off", "advice", hint="sudo nvidia-smi -pm 1  (or run nvidia-persistenced)")
def _no_persistence(facts: Facts) -> Iterator[str]:
    for ordinal, state in enumerate(facts.gpus):
        if state.persistence is False:
            yield (
                f"GPU {ordinal} ({state.device.name}): persistence mode is off, so a process that finds no "
                "other on it waits 1 to 3 s for the driver to initialise it "
                "(https://docs.nvidia.com/deploy/driver-persistence/overview.html)"
            )


# Processor, limits, shared memory and disk.


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


@rule(
    "no-avx2",
    "advice",
    hint="lscpu | grep -o 'avx[^ ]*'  (a virtual machine may hide it: give it the host's processor model)",
)
def _no_avx2(facts: Facts) -> Iterator[str]:
    hardware = facts.hardware
    if hardware.machine in ("x86_64", "AMD64") and "avx2" not in hardware.cpu_features:
        name = hardware.cpu_model or "the processor"
        yield f"{name} shows no AVX2: ONNX Runtime's CPU kernels fall back to code several times slower"


@rule("cores-above-quota", "advice")
def _cores_above_quota(facts: Facts) -> Iterator[Found]:
    quota, cores = facts.limits.quota_cores, facts.hardware.cores
    if quota is not None and cores > math.ceil(quota):
        text = (
            f"ONNX Runtime sees {cores} processors and chooses its threads by them; the control group "
            f"grants the time of {quota:.3g}, and all threads stop when that is used up"
        )
        threads = f"runtime: {{intra_op_num_threads: {max(1, math.floor(quota))}}} in the spec"
        yield Found(text, f"{threads}; ortprep doctor parallel MODEL measures what it costs")


@rule(
    "cpu-throttled",
    "advice",
    hint="a higher limit (docker run --cpus=…, resources.limits.cpu), or fewer intra_op_num_threads",
)
def _throttled(facts: Facts) -> Iterator[Found]:
    stopped = facts.limits.throttled_periods
    if stopped:
        periods = facts.limits.periods
        share = stopped / max(periods, stopped)
        text = (
            f"the control group was stopped in {stopped} of {periods} scheduling periods ({share:.0%}), "
            "because its processor time was used up"
        )
        yield Found(text, severity=None if share >= _THROTTLED_SHARE else "note")


@rule("memory-limited", "advice", hint="docker run --memory=…, or resources.limits.memory of the pod")
def _little_memory(facts: Facts) -> Iterator[str]:
    memory, installed = facts.limits.memory_bytes, facts.hardware.memory_bytes
    if memory is not None and memory < min(MIN_MEMORY_BYTES, installed):
        granted = f"{format_bytes(memory)} of {format_bytes(installed)} of memory"
        yield f"the control group grants {granted}; a session that needs more is killed"


@rule(
    "small-shared-memory",
    "advice",
    hint="docker run --shm-size=8g …  (Kubernetes: an emptyDir with medium: Memory at /dev/shm)",
)
def _small_shared_memory(facts: Facts) -> Iterator[str]:
    room = facts.shared_memory
    if room.total_bytes <= MIN_SHARED_BYTES:
        yield (
            f"{room.path} is {format_bytes(room.total_bytes)}, as container engines make it: "
            "Ray keeps objects there (SessionPool does not need it)"
        )


@rule("low-space", "advice")
def _low_space(facts: Facts) -> Iterator[Found]:
    room = facts.artifacts
    if room.free_bytes < LOW_SPACE_BYTES:
        text = (
            f"{format_bytes(room.free_bytes)} free where bundles are kept ({room.path}); a build needs "
            "several times the size of a model"
        )
        is_full = room.free_bytes < MIN_SPACE_BYTES
        yield Found(text, quoted("df", "-h", room.path), "problem" if is_full else None)
