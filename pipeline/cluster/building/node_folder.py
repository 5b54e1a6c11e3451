"""Where a node works: a folder for each cell, held by one process, with nothing of any other cell in it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.bundle.codec import encode
from pipeline.bundle.digest import default_cache_folder, digest_json
from pipeline.cluster.building.cell import Cell

_LITTER_S = 24 * 3600.0


@contextmanager
def working_folder(cell: Cell) -> Iterator[Path]:
    """Yields the folder of a cell, which is gone afterwards; waits while another process has it.

    What another node needs is in the store. Only a process that is killed leaves something here: the next one
    with an equal cell goes on with it (a search of hours has its journal here), and what nobody took up for a
    day is removed.

    Raises:
        OSError: It cannot be made.
    """
    root = default_cache_folder().with_name("cluster")
    own = digest_json(encode(cell)).partition(":")[2][:32]
    root.mkdir(parents=True, exist_ok=True)
    _remove_litter(root, but=own)
    with FileLock(root / f"{own}.lock"):
        folder = root / own
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_litter(root: Path, *, but: str) -> None:
    """Removes what cells left that were killed; locks stay, since whoever waits for one has it open."""
    for folder in root.iterdir():
        if folder.suffix == ".lock" or folder.name == but:
            continue
        try:
            with FileLock(root / f"{folder.name}.lock", timeout=0):
                if time.time() - folder.stat().st_mtime > _LITTER_S:
                    shutil.rmtree(folder, ignore_errors=True)
        except (Timeout, OSError):
            continue
