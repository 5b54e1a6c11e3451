"""How many cores this process may use, and how many threads a session of it should have.

Every load reads this, so it imports nothing that takes time.
"""

from __future__ import annotations

import math
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

WORKER_VARIABLES = ("ORTPREP_WORKERS", "WEB_CONCURRENCY")
"""Environment variables that say how many processes like this one share its cores: the second is that of
gunicorn, uvicorn and most platforms."""

_MAX_WORKERS = 10_000


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
