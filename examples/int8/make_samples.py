"""Writes inputs from real files to `samples/*.npz`; of two neighbours, each has every other file."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

SIDE, PADDING = 1024, 256
BATCH = 8
MAX_FILES = 16
"""Files of one suffix: as many of each, lest the most frequent type decides alone."""


def read_file(path: Path) -> np.ndarray[Any, Any]:
    """Returns the beginning and the end of a file as [2048], as Magika takes them."""
    content = path.read_bytes()
    begin, end = content[:4096].lstrip()[:SIDE], content[-4096:].rstrip()[-SIDE:]
    row = np.full(2 * SIDE, PADDING, np.int32)
    row[: len(begin)] = np.frombuffer(begin, np.uint8)
    row[2 * SIDE - len(end) :] = np.frombuffer(end, np.uint8)
    return row


def write_samples(folder: Path, paths: list[Path]) -> None:
    """Writes two `.npz` per 16 files, one to calibrate and one to judge; its array is named as the input."""
    folder.mkdir()
    for number in range(len(paths) // BATCH // 2 * 2):
        start = number // 2 * 2 * BATCH
        rows = [read_file(path) for path in paths[start + number % 2 : start + 2 * BATCH : 2]]
        np.savez(folder / f"{number:03}.npz", bytes=np.stack(rows))


if __name__ == "__main__":
    by_suffix = defaultdict(list)
    for path in sorted(Path(sys.argv[1]).rglob("*.*")):
        if path.is_file() and path.stat().st_size >= 64:
            by_suffix[path.suffix].append(path)
    chosen = [path for paths in by_suffix.values() for path in paths[:: len(paths) // MAX_FILES + 1]]
    write_samples(Path("samples"), chosen)
    print(len(chosen), "files of", len(by_suffix), "suffixes")
