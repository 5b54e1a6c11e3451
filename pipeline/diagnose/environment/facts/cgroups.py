"""Limits that control groups set for this process, in versions 1 and 2 of the kernel's interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from ortprep.diagnose.environment.facts.records import ResourceLimits
from ortprep.runtime.machine.hardware import Hardware

_ROOT = Path("/")
_NANOSECONDS, _MICROSECONDS = 1e9, 1e6
_UNLIMITED_BYTES = 2**60
"""Version 1 writes no limit as the largest multiple of a page, version 2 as `max`."""


def read_limits(hardware: Hardware, root: Path = _ROOT) -> ResourceLimits:
    """Reads what this process may use of the machine; of several levels of groups the strictest counts."""
    groups = _parse_groups(_read(root / "proc/self/cgroup"))
    folders = root / "sys/fs/cgroup"
    levels = [
        *_levels(folders, groups.get("", "/")),
        *_levels(folders / "unified", groups.get("", "/")),
        *_levels(folders / "cpu,cpuacct", groups.get("cpu", "/")),
        *_levels(folders / "cpu", groups.get("cpu", "/")),
    ]
    memory = [*levels, *_levels(folders / "memory", groups.get("memory", "/"))]
    limits = [limit for limit in map(_read_memory_limit, memory) if limit is not None]
    granted = [(cores, folder) for folder in levels if (cores := _read_cores(folder)) is not None]
    cores, folder = min(granted, default=(None, None), key=lambda found: found[0] or 0.0)
    counts = {} if folder is None else _parse_counts(_read(folder / "cpu.stat"))
    return ResourceLimits(
        cores=hardware.cores,
        quota_cores=cores,
        periods=counts.get("nr_periods", 0),
        throttled_periods=counts.get("nr_throttled", 0),
        throttled_s=_throttled_s(counts),
        memory_bytes=hardware.memory_bytes,
        memory_limit_bytes=min(limits, default=None),
    )


def _throttled_s(counts: Mapping[str, int]) -> float:
    if "throttled_usec" in counts:
        return counts["throttled_usec"] / _MICROSECONDS
    return counts.get("throttled_time", 0) / _NANOSECONDS


def _levels(mount: Path, group: str) -> Iterator[Path]:
    """Yields the folders of a group and of those around it, as far as they can be seen from here.

    A container often sees its own group alone, mounted as if it were the root, under a name it has outside.
    """
    inner = PurePosixPath(group.lstrip("/"))
    for level in (inner, *inner.parents):
        folder = mount / level
        if ".." not in level.parts and folder.is_dir():
            yield folder


def _parse_groups(text: str) -> dict[str, str]:
    """Returns the group of each controller, that of version 2 by the name ""."""
    groups = {}
    for line in text.splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        groups.update(dict.fromkeys(controllers.split(","), group or "/"))
    return groups


def _read_cores(folder: Path) -> float | None:
    second = _read(folder / "cpu.max").split()
    quota, period = (
        second if len(second) == 2 else (_read(folder / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
    )
    if not (quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0):
        return None
    return int(quota) / int(period)


def _read_memory_limit(folder: Path) -> int | None:
    text = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None


def _parse_counts(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
