"""Real inputs of a model, kept while an application runs: a bounded choice of every shape that occurs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortprep.runtime.tensors.arrays import write_tensors

MAX_KEPT_BYTES = 512 * 2**20
"""Maximum size of the inputs that are kept of one model by one process, in bytes."""

MAX_COUNTED_SHAPES = 4096
"""Maximum number of sets of shapes whose runs are counted; inputs of others are not kept."""

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class InputKeeper:
    """Keeps inputs as `.npz` files of arrays by input name. Not safe for threads.

    As many of each set of shapes as there is room for, and of these each run is kept as likely as any other.

    Args:
        folder: Where the files go; nobody else may read it.
        prefix: First part of their names.
        limit: Maximum number of inputs.
    """

    def __init__(self, folder: Path, prefix: str, limit: int) -> None:
        self._folder, self._prefix, self._limit = folder, prefix, limit
        self._slots: dict[_Shapes, list[int]] = {}
        self._runs: dict[_Shapes, int] = {}
        self._sizes_bytes: list[int] = []  # by slot
        self._random = random.Random(0)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files, those of the same shapes one after the other."""
        return tuple(self._name(slot) for key in sorted(self._slots) for slot in sorted(self._slots[key]))

    def add(self, feed: Mapping[str, Any]) -> None:
        """Keeps what is fed to a run, or does not; what is no array of numbers is never kept.

        Raises:
            OSError: The disk is full.
        """
        arrays = {name: value for name, value in feed.items() if isinstance(value, np.ndarray)}
        if (
            not arrays
            or len(arrays) < len(feed)
            or any(one.dtype.kind not in "biuf" for one in arrays.values())
        ):
            return
        key: _Shapes = tuple((name, array.shape) for name, array in sorted(arrays.items()))
        if key not in self._runs and len(self._runs) >= MAX_COUNTED_SHAPES:
            return
        self._runs[key] = self._runs.get(key, 0) + 1
        slot = self._choose_slot(key, sum(array.nbytes for array in arrays.values()))
        if slot is not None:
            write_tensors(self._folder / self._name(slot), arrays)

    def _choose_slot(self, key: _Shapes, size_bytes: int) -> int | None:
        """Returns the number of the file to write; None for none."""
        own, total_bytes = self._slots.get(key, []), sum(self._sizes_bytes)
        if len(self._sizes_bytes) < self._limit:
            if total_bytes + size_bytes > MAX_KEPT_BYTES:
                return None
            self._slots.setdefault(key, []).append(len(self._sizes_bytes))
            self._sizes_bytes.append(size_bytes)
            return len(self._sizes_bytes) - 1
        largest = max(self._slots, key=lambda one: len(self._slots[one]))
        has_share = len(self._slots[largest]) <= len(own) + 1
        if has_share and not (own and self._random.random() < len(own) / self._runs[key]):
            return None
        source = key if has_share else largest
        slot = self._random.choice(self._slots[source])
        if total_bytes - self._sizes_bytes[slot] + size_bytes > MAX_KEPT_BYTES:
            return None
        self._slots[source].remove(slot)
        self._slots.setdefault(key, []).append(slot)
        self._sizes_bytes[slot] = size_bytes
        return slot

    def _name(self, slot: int) -> str:
        return f"{self._prefix}-{slot:04}.npz"


def choose_spread(files: Sequence[Path], limit: int) -> tuple[Path, ...]:
    """Returns as many files as a limit allows, from all over their order."""
    count = min(limit, len(files))
    return tuple(files[index * len(files) // count] for index in range(count))
