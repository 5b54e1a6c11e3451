"""Limits that control groups set for this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ortprep.runtime.machine.cores import group_folders, read_quota, read_text

_ROOT = Path("/")

_NO_LIMIT = 2**60
"""Version 1 writes a number of bytes near 2**63 where there is no limit."""


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


def read_limits(root: Path = _ROOT) -> ResourceLimits:
    """Reads what this process may use of the machine; of several levels of groups the strictest counts."""
    files = [
        f"{folder}/{name}"
        for folder in group_folders(str(root), "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    limits = [int(text) for file in files if (text := read_text(file)).isdigit() and int(text) < _NO_LIMIT]
    folders = group_folders(str(root), "cpu")
    quotas = [(cores, folder) for folder in folders if (cores := read_quota(folder)) is not None]
    cores, folder = min(quotas, default=(None, None))
    statistics = "" if folder is None else read_text(f"{folder}/cpu.stat")
    counts = dict(line.split(maxsplit=1) for line in statistics.splitlines() if " " in line)
    return ResourceLimits(
        quota_cores=cores,
        periods=int(counts.get("nr_periods", 0)),
        throttled_periods=int(counts.get("nr_throttled", 0)),
        memory_bytes=min(limits, default=None),
    )
