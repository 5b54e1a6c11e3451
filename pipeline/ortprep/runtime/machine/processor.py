"""The processor: its features, how many cores this process may use, and how many threads a session gets.

Every load reads this, so it imports nothing that takes time.
"""

from __future__ import annotations

import ctypes
import math
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

WORKER_VARIABLES = ("ORTPREP_WORKERS", "WEB_CONCURRENCY")
"""Environment variables that say how many processes like this one share its cores: the second is that of
gunicorn, uvicorn and most platforms."""

_MAX_WORKERS = 10_000

_LEAF_1, _LEAF_7, _LEAF_7_1 = 0, 1, 6
_EAX, _EBX, _ECX, _EDX = range(4)

CPUID_BITS = {
    "pni": (_LEAF_1, _ECX, 0),
    "ssse3": (_LEAF_1, _ECX, 9),
    "fma": (_LEAF_1, _ECX, 12),
    "sse4_1": (_LEAF_1, _ECX, 19),
    "sse4_2": (_LEAF_1, _ECX, 20),
    "avx": (_LEAF_1, _ECX, 28),
    "f16c": (_LEAF_1, _ECX, 29),
    "avx2": (_LEAF_7, _EBX, 5),
    "avx512f": (_LEAF_7, _EBX, 16),
    "avx512dq": (_LEAF_7, _EBX, 17),
    "avx512cd": (_LEAF_7, _EBX, 28),
    "avx512bw": (_LEAF_7, _EBX, 30),
    "avx512vl": (_LEAF_7, _EBX, 31),
    "avx512vbmi": (_LEAF_7, _ECX, 1),
    "avx512_vnni": (_LEAF_7, _ECX, 11),
    "amx_bf16": (_LEAF_7, _EDX, 22),
    "amx_tile": (_LEAF_7, _EDX, 24),
    "amx_int8": (_LEAF_7, _EDX, 25),
    "avx_vnni": (_LEAF_7_1, _EAX, 4),
    "avx512_bf16": (_LEAF_7_1, _EAX, 5),
}
"""Flags of `/proc/cpuinfo` by (glibc's index of the CPUID leaf, register, bit)."""


def find_thread_limit(
    environment: Mapping[str, str], root: str = "/", *, workers: int | None = None
) -> tuple[int, str] | None:
    """Returns the most threads that a session of this process should have, and why.

    ONNX Runtime starts a thread per core of the machine and lets it spin, also where the process may use
    fewer cores or shares them with other workers. None means that nothing of this is so.

    Args:
        environment: The environment of the process.
        root: Where the kernel's file systems are mounted.
        workers: Number of processes like this one that share its cores; None reads it from `environment`.
    """
    cores = usable_cores(root)
    name, count = _workers_of(environment) if workers is None else ("workers", workers)
    if count > 1:
        return max(1, cores // count), f"{cores} usable cores for {count} workers ({name})"
    if cores < (os.cpu_count() or 1):
        return cores, f"{cores} usable cores of {os.cpu_count()}"
    return None


def _workers_of(environment: Mapping[str, str]) -> tuple[str, int]:
    """Returns the first variable that holds a number of workers, and the number; 1 without one."""
    for name in WORKER_VARIABLES:
        value = environment.get(name, "")
        if value.isdecimal() and len(value) < 6 and 0 < int(value) <= _MAX_WORKERS:
            return name, int(value)
    return "", 1


def usable_cores(root: str = "/") -> int:
    """Returns how many cores this process may use at once: those of its affinity mask, or its quota if less.

    A part of a core counts as one.
    """
    quotas = [quota for folder in group_folders(root, "cpu") if (quota := read_quota(folder)) is not None]
    cores = len(os.sched_getaffinity(0))
    return min([cores, *(max(1, math.ceil(quota)) for quota in quotas)])


def group_folders(root: str, controller: str) -> list[str]:
    """Returns the folders of this process's control group and of those around it, as far as they can be seen.

    Args:
        root: Where the kernel's file systems are mounted.
        controller: What limits, in version 1 of the interface: `cpu`, `memory`. In version 2 all is in one
        place.
    """
    base = f"{root.rstrip('/')}/sys/fs/cgroup"
    for line in read_text(f"{root.rstrip('/')}/proc/self/cgroup").splitlines():
        _, _, entry = line.partition(":")
        controllers, _, group = entry.partition(":")
        if not group.startswith("/") or (controllers and controller not in controllers.split(",")):
            continue
        mount = f"{base}/{controllers}" if controllers else base
        # A container sees its own group as the root, and a group outside of it as `..`.
        parts = [part for part in group.split("/") if part]
        levels = ["/".join(parts[:count]) for count in range(len(parts), -1, -1)]
        found = [f"{mount}/{level}".rstrip("/") for level in levels if ".." not in level.split("/")]
        if existing := [folder for folder in found if os.path.isdir(folder)]:
            return existing
    return []


def read_quota(folder: str) -> float | None:
    """Returns the processor time that a control group grants, in cores; None for no limit."""
    quota, _, period = read_text(f"{folder}/cpu.max").partition(" ")
    if not quota:  # version 1
        quota, period = (read_text(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def read_text(path: str) -> str:
    """Returns the text of a file of the kernel's, "" if it is not there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_cpuid() -> dict[int, tuple[int, ...]] | None:
    """Returns the registers of the leaves that `CPUID_BITS` names, as far as the kernel allows their use.

    `/proc/cpuinfo` describes the host even when this process runs on an emulated processor, and ONNX Runtime
    asks the processor. The C library has its answer since glibc 2.33; None for older ones and other
    processors.
    """
    function = getattr(ctypes.CDLL(None), "__x86_get_cpuid_feature_leaf", None)
    if function is None:
        return None
    function.restype = ctypes.POINTER(ctypes.c_uint32 * 8)
    function.argtypes = [ctypes.c_uint32]
    # Four registers as the processor gave them, then the same four with what the kernel allows to be used.
    return {leaf: tuple(function(leaf).contents)[4:] for leaf in (_LEAF_1, _LEAF_7, _LEAF_7_1)}
