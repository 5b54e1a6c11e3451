"""Where a node works: a folder for each job, held by one process, with nothing of any other job in it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ortprep.bundle.codec import encode
from ortprep.bundle.digest import digest_json
from ortprep.bundle.file_memory import require_cache_folder
from ortprep.cluster.building.job import BuildJob

_STALE_S = 24 * 3600.0


@contextmanager
def working_folder(job: BuildJob) -> Iterator[Path]:
    """Yields the folder of a job; waits while another process has it.

    Who has published removes it. What a job that failed or was killed leaves here, the next one with an equal
    job takes up: it goes on with the finished tasks. What nobody took up for a day is removed.

    Raises:
        CacheError: Others could change what is in the cache folder.
    """
    root = Path(require_cache_folder("cluster"))
    name = digest_json(encode(job)).partition(":")[2][:32]
    _remove_stale(root, but=name)
    with FileLock(root / f"{name}.lock"):
        folder = root / name
        folder.mkdir(exist_ok=True)
        yield folder


def _remove_stale(root: Path, *, but: str) -> None:
    """Removes what jobs left that were killed; locks stay, since waiting processes have them open."""
    for folder in root.iterdir():
        if folder.suffix == ".lock" or folder.name == but:
            continue
        try:
            with FileLock(root / f"{folder.name}.lock", timeout=0):
                if time.time() - folder.stat().st_mtime > _STALE_S:
                    shutil.rmtree(folder, ignore_errors=True)
        except (Timeout, OSError):
            continue
