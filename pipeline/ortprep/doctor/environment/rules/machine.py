"""Rules about the machine: processor, limits, shared memory and disk."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ortprep.doctor.diagnosis import Finding, format_bytes
from ortprep.doctor.environment.facts.records import Facts
from ortprep.quoting import quoted
from ortprep.runtime.machine.cgroups import ResourceLimits

MIN_SHARED_BYTES = 64 * 1024 * 1024
"""Default size in container engines; a pool's tensors do not fit."""

MIN_SPACE_BYTES = 1024**3
"""A build needs the size of a model several times over."""

LOW_SPACE_BYTES = 5 * 1024**3

MIN_MEMORY_BYTES = 1024**3

_THROTTLED_SHARE = 0.01


def check_processor(facts: Facts) -> Iterator[Finding]:
    """Yields instruction sets whose absence makes ONNX Runtime's CPU kernels slower."""
    hardware = facts.hardware
    if hardware.machine in ("x86_64", "AMD64") and "avx2" not in hardware.cpu_features:
        yield Finding(
            "no-avx2",
            "advice",
            f"{hardware.cpu_model or 'the processor'} shows no AVX2: ONNX Runtime's CPU kernels fall back to "
            "code several times slower",
            "lscpu | grep -o 'avx[^ ]*'  (a virtual machine may hide it: give it the host's processor model)",
        )


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Yields what the control groups this process is in cost it."""
    limits, cores, installed = facts.limits, facts.hardware.cores, facts.hardware.memory_bytes
    if limits.quota_cores is not None and cores > math.ceil(limits.quota_cores):
        yield _above_quota(cores, limits.quota_cores)
    if limits.throttled_periods:
        yield _throttled(limits)
    memory = limits.memory_bytes
    if memory is not None and memory < min(MIN_MEMORY_BYTES, installed):
        yield Finding(
            "memory-limited",
            "advice",
            f"the control group grants {format_bytes(memory)} of {format_bytes(installed)} of "
            "memory; a session that needs more is killed",
            "docker run --memory=…, or resources.limits.memory of the pod",
        )


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Yields whether `/dev/shm` has room for Ray's object store."""
    room = facts.shared_memory
    if room.total_bytes <= MIN_SHARED_BYTES:
        yield Finding(
            "small-shared-memory",
            "advice",
            f"{room.path} is {format_bytes(room.total_bytes)}, as container engines make it: "
            "Ray keeps objects there (SessionPool does not need it)",
            "docker run --shm-size=8g …  (Kubernetes: an emptyDir with medium: Memory at /dev/shm)",
        )


def check_disk(facts: Facts) -> Iterator[Finding]:
    """Yields whether bundles have room."""
    room = facts.artifacts
    if room.free_bytes < LOW_SPACE_BYTES:
        yield Finding(
            "low-space",
            "problem" if room.free_bytes < MIN_SPACE_BYTES else "advice",
            f"{format_bytes(room.free_bytes)} free where bundles are kept ({room.path}); a build "
            "needs several times the size of a model",
            quoted("df", "-h", room.path),
        )


def _above_quota(cores: int, quota: float) -> Finding:
    threads = max(1, math.floor(quota))
    return Finding(
        "cores-above-quota",
        "advice",
        f"ONNX Runtime sees {cores} processors and chooses its threads by them; the control "
        f"group grants the time of {quota:.3g}, and all threads stop when that is used up",
        f"runtime: {{intra_op_num_threads: {threads}}} in the spec (SessionOptions.intra_op_num_threads)",
    )


def _throttled(limits: ResourceLimits) -> Finding:
    share = limits.throttled_periods / max(limits.periods, limits.throttled_periods)
    return Finding(
        "cpu-throttled",
        "advice" if share >= _THROTTLED_SHARE else "note",
        f"the control group was stopped in {limits.throttled_periods} of {limits.periods} scheduling periods "
        f"({share:.0%}), because its processor time was used up",
        "a higher limit (docker run --cpus=…, resources.limits.cpu), or fewer intra_op_num_threads",
    )
