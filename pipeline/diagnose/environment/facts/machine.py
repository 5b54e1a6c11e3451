"""Processor, file systems and environment variables of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ortprep.diagnose.environment.facts.records import DiskSpace, Processor
from ortprep.runtime.machine.hardware import KERNEL_FEATURES, Hardware
from ortprep.telemetry import TELEMETRY_VARIABLE

_ROOT = Path("/")
_ESCAPED = re.compile(r"\\([0-7]{3})")

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MODULE_LOADING",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_CACHE_DISABLE",
    "CUDA_CACHE_PATH",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_HOME",
    "CUDA_PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    TELEMETRY_VARIABLE,
)
"""Environment variables that change which libraries are loaded, what is seen, compiled or sent."""


def describe_processor(hardware: Hardware) -> Processor:
    """Returns what of the processor decides which kernels ONNX Runtime takes."""
    features = tuple(flag for flag in hardware.cpu_features if flag in KERNEL_FEATURES)
    return Processor(hardware.machine, hardware.cpu_model, features)


def read_disk_space(folder: Path, root: Path = _ROOT) -> DiskSpace | None:
    """Reads the size of the file system a folder is on, or will be on once it is made.

    Returns:
        None if the folder is neither there nor can be.
    """
    there = next((level for level in (folder, *folder.parents) if level.is_dir()), None)
    if there is None:
        return None
    try:
        room = os.statvfs(there)
    except OSError:
        return None
    return DiskSpace(
        path=str(folder),
        kind=_file_system_of(there, root),
        total_bytes=room.f_blocks * room.f_frsize,
        free_bytes=room.f_bavail * room.f_frsize,
    )


def read_variables() -> dict[str, str]:
    """Returns the environment variables that change what is loaded, those that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _file_system_of(folder: Path, root: Path) -> str:
    try:
        text = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        real = folder.resolve()
    except OSError:
        return ""
    mounts: list[tuple[int, str]] = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 4 and real.is_relative_to(point := _unescape(fields[4])):
            mounts.append((len(point), after.partition(" ")[0]))
    # The last of those mounted at one point is the one that is seen.
    return max(reversed(mounts), key=lambda mount: mount[0], default=(0, ""))[1]


def _unescape(point: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), point)
