"""The output of this process in a file: ONNX Runtime says some things there and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Sends what this process and its libraries print to a file while the block runs."""
    saved = [os.dup(handle) for handle in (1, 2)]
    with path.open("wb") as file:
        for handle in (1, 2):
            os.dup2(file.fileno(), handle)
        try:
            yield
        finally:
            for handle, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, handle)
                os.close(copy)


def read_start(path: Path, max_bytes: int) -> str:
    """Returns the first bytes of a file as text."""
    with path.open("rb") as file:
        return file.read(max_bytes).decode(errors="replace")
