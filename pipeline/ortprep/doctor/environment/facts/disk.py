"""Size of a folder's file system."""

from __future__ import annotations

import shutil
from pathlib import Path

from ortprep.doctor.environment.facts.records import DiskSpace


def read_disk_space(folder: Path) -> DiskSpace:
    """Reads the size of the file system that a folder is on, or will be on once it is made."""
    usage = shutil.disk_usage(next(level for level in (folder, *folder.parents) if level.is_dir()))
    return DiskSpace(str(folder), usage.total, usage.free)
