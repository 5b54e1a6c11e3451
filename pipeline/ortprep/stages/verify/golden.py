"""The golden sample: the smallest input and what the source answers, copied from file to file."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import IO

import numpy as np

from ortprep.children.answers import Answer, read_answer
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.verification.golden import INPUT, LAYOUT, OUTPUT, PART

GOLDEN_FILE = "golden.npz"

OWN_GOLDEN_FILE = "own_golden.npz"
"""Of a converted variant: a sample that it takes, with its own answers if it has a precision of its own."""

MAX_GOLDEN_BYTES = 2**20
"""Size of the largest golden sample, unless its inputs, which are kept whole, are larger by themselves:
every load that checks answers reads it."""

MIN_OUTPUT_BYTES = 2**18
"""What outputs may take in any case."""


def write_golden(path: Path, *, sample: Path, answers: Sequence[Answer]) -> None:
    """Writes a sample and the recorded answers to it, as `ortprep.runtime.verification.golden` reads them.

    Every output is there, each with an equal share of the room: whole if it fits, else every k-th element.
    Neither inputs nor large outputs are ever in memory.

    Args:
        path: The new `.npz` file; equal arrays give equal bytes.
        sample: `.npz` of arrays by input name.
        answers: The outputs, in the model's order.

    Raises:
        StageError: An output cannot be read.
        OSError: A file cannot be read or written.
    """
    room_bytes = max(MAX_GOLDEN_BYTES - sample.stat().st_size, MIN_OUTPUT_BYTES)
    share_bytes = room_bytes // max(1, len(answers))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as golden, zipfile.ZipFile(sample) as inputs:
        for entry in inputs.infolist():
            with inputs.open(entry) as file:
                _append(golden, f"{INPUT}{entry.filename}", file, size_bytes=entry.file_size)
        for answer in answers:
            array = read_answer(answer)
            # Odd, so that the elements are not all of one column where the last axis is a power of two.
            step = -(-array.nbytes // share_bytes) | 1 if array.nbytes > share_bytes else 1
            if step == 1:
                _append_array(golden, f"{OUTPUT}{answer.output}", array)
            else:
                _append_array(golden, f"{PART}{answer.output}", array.reshape(-1)[::step])
                _append_array(golden, f"{LAYOUT}{answer.output}", np.array([step, *array.shape], np.int64))


def _append_array(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    size_bytes = file.tell()
    file.seek(0)
    _append(archive, f"{name}.npy", file, size_bytes=size_bytes)


def _append(archive: zipfile.ZipFile, name: str, file: IO[bytes], *, size_bytes: int) -> None:
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.file_size = size_bytes  # tells zipfile whether it needs 64-bit sizes
    with archive.open(entry, "w") as member:
        shutil.copyfileobj(file, member, 2**20)
