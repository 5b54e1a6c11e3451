"""Memory of this process, from the kernel's own accounts; in bytes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_SMAPS_ROLLUP = Path("/proc/self/smaps_rollup")
_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")


def private_bytes() -> int:
    """Returns the anonymous memory of this process: what another process on the same files cannot share.

    Mapped weights are not in it, so unlike the resident set it tells a prepared model from a default one.
    """
    value = _read_field(_SMAPS_ROLLUP, "Anonymous:")
    if value is None:
        value = _read_field(_STATUS, "RssAnon:")
    return 0 if value is None else value


def peak_rss_bytes() -> int:
    """Returns the largest resident set of this process alone, mapped pages included.

    The kernel's high-water mark starts afresh at exec; that of `getrusage` is inherited from the parent.
    """
    value = _read_field(_STATUS, "VmHWM:")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if value is None else value


def available_bytes() -> int:
    """Returns how much memory a child may take: nine tenths of what is available, so that it fails first."""
    value = _read_field(_MEMINFO, "MemAvailable:")
    if value is None:
        value = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return value * 9 // 10


def _read_field(path: Path, name: str) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith(name)), None)
    return None if line is None else int(line.split()[1]) * 1024
