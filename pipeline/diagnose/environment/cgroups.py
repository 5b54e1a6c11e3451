"""What control groups grant this process, under version 1 and 2 of the kernel's interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_NANOSECONDS, _MICROSECONDS = 1e9, 1e6
_UNLIMITED_BYTES = 2**60
"""Version 1 writes no limit as the largest multiple of a page, version 2 as `max`."""


@dataclass(frozen=True)
class Grant:
    """What the groups a process is in grant it, the least of all levels.

    Attributes:
        cores: Processor time per wall time, None for no limit.
        periods: Scheduling periods of the group that sets that limit.
        throttled_periods: Those in which the group was stopped.
        throttled_s: Seconds it was stopped in all.
        memory_bytes: None for no limit.
    """

    cores: float | None = None
    periods: int = 0
    throttled_periods: int = 0
    throttled_s: float = 0.0
    memory_bytes: int | None = None


def read_grant(root: Path = _ROOT) -> Grant:
    """Reads what this process's control groups grant it.

    Args:
        root: Folder in which `proc` and `sys` are.
    """
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
    return Grant(
        cores=cores,
        periods=counts.get("nr_periods", 0),
        throttled_periods=counts.get("nr_throttled", 0),
        throttled_s=_throttled_s(counts),
        memory_bytes=min(limits, default=None),
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
