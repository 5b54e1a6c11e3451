"""Limits that control groups (version 2 of the kernel's interface) set for this process."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


@dataclass(frozen=True)
class ResourceLimits:
    """Resources that this process may use.

    Attributes:
        quota_cores: Processor time its control groups grant, in cores; None for no limit.
        periods: Scheduling periods in which the limited group wanted to run.
        throttled_periods: Those of them in which it was stopped for having used up its share.
        memory_bytes: Memory its control groups grant, None for no limit.
    """

    quota_cores: float | None = None
    periods: int = 0
    throttled_periods: int = 0
    memory_bytes: int | None = None


def usable_cores(root: Path = _ROOT) -> int:
    """Returns how many cores this process may use at once: those of its affinity mask, or its quota if less.

    A part of a core counts as one.
    """
    quota = read_limits(root).quota_cores
    cores = len(os.sched_getaffinity(0))
    return cores if quota is None else min(cores, max(1, math.ceil(quota)))


def read_limits(root: Path = _ROOT) -> ResourceLimits:
    """Reads what this process may use of the machine; of several levels of groups the strictest counts."""
    levels = _levels(root)
    limits = [int(text) for folder in levels if (text := read_text(folder / "memory.max")).isdigit()]
    quotas = [(cores, folder) for folder in levels if (cores := _read_cores(folder)) is not None]
    cores, folder = min(quotas, default=(None, None))
    statistics = "" if folder is None else read_text(folder / "cpu.stat")
    counts = dict(line.split(maxsplit=1) for line in statistics.splitlines() if " " in line)
    return ResourceLimits(
        quota_cores=cores,
        periods=int(counts.get("nr_periods", 0)),
        throttled_periods=int(counts.get("nr_throttled", 0)),
        memory_bytes=min(limits, default=None),
    )


def _levels(root: Path) -> list[Path]:
    """Returns the folders of this process's group and of those around it, as far as they can be seen."""
    lines = read_text(root / "proc/self/cgroup").splitlines()
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    inner = PurePosixPath(group)
    folders = (root / "sys/fs/cgroup" / level for level in (inner, *inner.parents))
    # A container sees its own group as the root, and a group outside of it as `..`.
    return [folder for folder in folders if ".." not in folder.parts and folder.is_dir()]


def _read_cores(folder: Path) -> float | None:
    quota, _, period = read_text(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def read_text(path: Path) -> str:
    """Returns the text of a file of the kernel's, "" if it is not there."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
