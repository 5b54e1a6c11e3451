"""The golden sample: the smallest input and what the source answers, copied from file to file."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from pipeline.runtime.answers import Answer

GOLDEN_FILE = "golden.npz"

OWN_GOLDEN_FILE = "own_golden.npz"
"""Of a converted variant: a sample that it takes, with its own answers if it has a precision of its own."""

MAX_GOLDEN_BYTES = 64 * 2**20
"""Size the golden sample is kept below where it can be: every load that checks answers reads it."""


def write_golden(path: Path, *, sample: Path, answers: Sequence[Answer]) -> None:
    """Writes a sample and answers to it as `input:NAME` and `output:NAME`; no array is ever in memory.

    Outputs are kept from the smallest up, as long as all fits into `MAX_GOLDEN_BYTES`, and at least one.

    Args:
        path: The new `.npz` file; equal arrays give equal bytes.
        sample: `.npz` of arrays by input name.
        answers: The outputs, in the model's order.

    Raises:
        OSError: A file cannot be read or written.
    """
    sizes = {answer.output: Path(answer.file).stat().st_size for answer in answers}
    kept = select_outputs(sizes, room_bytes=MAX_GOLDEN_BYTES - sample.stat().st_size)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as golden:
        with zipfile.ZipFile(sample) as inputs:
            for entry in inputs.infolist():
                with inputs.open(entry) as file:
                    _append(golden, f"input:{entry.filename}", file, size_bytes=entry.file_size)
        for answer in answers:
            if answer.output in kept:
                with Path(answer.file).open("rb") as file:
                    _append(golden, f"output:{answer.output}.npy", file, size_bytes=sizes[answer.output])


def _append(archive: zipfile.ZipFile, name: str, file: IO[bytes], *, size_bytes: int) -> None:
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.file_size = size_bytes  # tells zipfile whether it needs 64-bit sizes
    with archive.open(entry, "w") as member:
        shutil.copyfileobj(file, member, 2**20)


def select_outputs(size_bytes: Mapping[str, int], *, room_bytes: int) -> frozenset[str]:
    """Returns the names of the smallest outputs that fit together, at least one if there is any."""
    kept: set[str] = set()
    for name in sorted(size_bytes, key=lambda name: size_bytes[name]):
        room_bytes -= size_bytes[name]
        if kept and room_bytes < 0:
            break
        kept.add(name)
    return frozenset(kept)
