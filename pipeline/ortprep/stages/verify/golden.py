"""The golden sample: the smallest input and what the source answers, copied from file to file."""

from __future__ import annotations

import math
import shutil
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import IO

import numpy as np

from ortprep.children.answers import Answer, read_answer
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.verification.compare import BLOCK_ELEMENTS, read_block
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

    Every output is there: whole if it is small, else a part of its elements. No output is ever in memory.

    Args:
        path: The new `.npz` file; equal arrays give equal bytes.
        sample: `.npz` of arrays by input name.
        answers: The outputs, in the model's order.

    Raises:
        StageError: An output cannot be read.
        OSError: A file cannot be read or written.
    """
    sizes = {answer.output: Path(answer.file).stat().st_size for answer in answers}
    room_bytes = max(MAX_GOLDEN_BYTES - sample.stat().st_size, MIN_OUTPUT_BYTES)
    share_bytes = share_room(list(sizes.values()), room_bytes=room_bytes)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as golden:
        with zipfile.ZipFile(sample) as inputs:
            for entry in inputs.infolist():
                with inputs.open(entry) as file:
                    _append(golden, f"{INPUT}{entry.filename}", file, size_bytes=entry.file_size)
        for answer in answers:
            if sizes[answer.output] <= share_bytes:
                with Path(answer.file).open("rb") as file:
                    _append(golden, f"{OUTPUT}{answer.output}.npy", file, size_bytes=sizes[answer.output])
            else:
                part, layout = take_part(read_answer(answer), max_bytes=share_bytes)
                _append_array(golden, f"{PART}{answer.output}.npy", part)
                _append_array(golden, f"{LAYOUT}{answer.output}.npy", layout)


def _append(archive: zipfile.ZipFile, name: str, file: IO[bytes], *, size_bytes: int) -> None:
    entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    entry.file_size = size_bytes  # tells zipfile whether it needs 64-bit sizes
    with archive.open(entry, "w") as member:
        shutil.copyfileobj(file, member, 2**20)


def _append_array(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    size_bytes = file.tell()
    file.seek(0)
    _append(archive, name, file, size_bytes=size_bytes)


def share_room(size_bytes: Sequence[int], *, room_bytes: int) -> int:
    """Returns what each of several may take so that all fit; what small ones leave goes to the others."""
    share_bytes = room_bytes
    for index, smallest in enumerate(sorted(size_bytes)):
        share_bytes = room_bytes // (len(size_bytes) - index)
        if smallest > share_bytes:
            break
        room_bytes -= smallest
    return share_bytes


def take_part(array: Array, *, max_bytes: int) -> tuple[Array, Array]:
    """Returns elements at the positions 0, step, 2 · step, … in C order, and the step with the array's shape.

    The step is the smallest that leaves at most `max_bytes`, one element at least, and that has no divisor in
    common with the array's size: so the positions go through every index of every axis.
    """
    step = max(1, -(-array.size // max(1, max_bytes // array.itemsize)))
    while math.gcd(step, array.size) > 1:
        step += 1
    blocks = [
        read_block(array, start, min(start + BLOCK_ELEMENTS, array.size))[-start % step :: step]
        for start in range(0, max(1, array.size), BLOCK_ELEMENTS)
    ]
    return np.concatenate(blocks), np.array([step, *array.shape], np.int64)
