"""What an application does with its models: the record of one process, and the inputs that are kept."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ortprep.bundle.atomic import new_file
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.runtime.tensors.element_types import Array

MAX_FEEDS = 64
"""Maximum number of sets of shapes kept apart per model: the first ones."""

MAX_SMALL_SIZE = 4
"""Maximum number of elements of an array whose values are remembered one by one."""

MAX_VALUES = 8
"""Maximum number of such values."""

_MAX_TEXT = 64  # characters of a string value
_FIRST_RUNS = 8  # of a set of shapes, whose values are looked at

Value = bool | int | float | str
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Limits = tuple[int | float, int | float]
"""Lowest and highest finite number."""


@dataclass(frozen=True)
class FeedRecord:
    """Runs with the same shapes.

    Attributes:
        runs: Number of runs.
        shapes: What was fed, by input name.
        values: Every value that was seen of an input, if they are few and the array is small.
        limits: Lowest and highest finite number that was seen, by input name.
    """

    runs: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    values: Mapping[str, tuple[bool | int | float | str, ...]] = field(default_factory=dict)
    limits: Mapping[str, tuple[int | float, int | float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelRecord:
    """Sessions of one model with the same options in one process.

    Attributes:
        path: Absolute path of the model; None if the application gave bytes.
        saved: Name of the file beside the record that holds such bytes; None for a path.
        size_bytes: Size of the model file.
        modified_ns: Modification time of the model file; 0 for bytes.
        options: Session options that differ from ONNX Runtime's defaults.
        providers: Execution providers that were asked for, with their options.
        obtained: Names of the providers of the session.
        obstacle: Why `ortprep run` would give such a session no bundle; None if it would.
        inputs: Types of the inputs by name, as ONNX Runtime spells them: `tensor(float)`.
        loads: Number of sessions; one that a fork has from its parent counts there.
        runs: Number of runs of all of them.
        feeds: Runs by their shapes; other runs had yet other shapes.
        kept: Names of the files beside the record that hold real inputs; none unless they were asked for.
    """

    path: str | None
    saved: str | None
    size_bytes: int
    modified_ns: int
    options: SessionOptionsRecord
    providers: tuple[ProviderRecord, ...]
    obtained: tuple[str, ...]
    obstacle: str | None
    inputs: Mapping[str, str]
    loads: int = 0
    runs: int = 0
    feeds: tuple[FeedRecord, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessRecord:
    """What one process of an application did.

    Attributes:
        onnxruntime: Version of its ONNX Runtime.
        models: Models, in the order of their first session.
    """

    onnxruntime: str
    models: tuple[ModelRecord, ...]


class ModelObserver:
    """Counts the sessions and runs of one model, by the shapes that are fed. Not safe for threads.

    Args:
        model: What is known of the model before it runs.
        keeper: Keeps real inputs of the model; None for none.
    """

    def __init__(self, model: ModelRecord, keeper: InputKeeper | None = None) -> None:
        self._model = model
        self.restart(keeper)

    def restart(self, keeper: InputKeeper | None) -> None:
        """Forgets all sessions and runs, and keeps inputs elsewhere."""
        self.keeper = keeper
        self._feeds: dict[Shapes, FeedRecord] = {}
        self.loads = self.runs = 0

    @property
    def inputs(self) -> Mapping[str, str]:
        """Types of the model's inputs by name: `tensor(float)`."""
        return self._model.inputs

    def add(self, feed: Mapping[str, Array]) -> bool:
        """Counts a run on arrays, by input name, and returns whether their shapes are new."""
        self.runs += 1
        key = tuple((name, array.shape) for name, array in feed.items())
        known = self._feeds.get(key)
        if known is None:
            if len(self._feeds) < MAX_FEEDS:
                self._feeds[key] = describe_run(feed)
            return key in self._feeds
        if known.runs < _FIRST_RUNS:
            self._feeds[key] = merge_feeds(known, describe_run(feed))
        else:
            self._feeds[key] = replace(known, runs=known.runs + 1)
        return False

    def observed(self) -> ModelRecord:
        """Returns what was seen, in the order of the first run of each set of shapes."""
        feeds, kept = tuple(self._feeds.values()), () if self.keeper is None else self.keeper.files
        return replace(self._model, loads=self.loads, runs=self.runs, feeds=feeds, kept=kept)


def describe_run(feed: Mapping[str, Array]) -> FeedRecord:
    """Returns the record of one run on arrays."""
    values, limits = {}, {}
    for name, array in feed.items():
        if not array.size:
            continue
        few = tuple(dict.fromkeys(array.reshape(-1).tolist())) if array.size <= MAX_SMALL_SIZE else ()
        if few and all(map(_is_value, few)):
            values[name] = few
        finite = array[np.isfinite(array)] if array.dtype.kind == "f" else array
        if array.dtype.kind in "iuf" and finite.size:
            limits[name] = (finite.min().item(), finite.max().item())
    return FeedRecord(1, {name: array.shape for name, array in feed.items()}, values, limits)


def merge_feeds(one: FeedRecord, other: FeedRecord) -> FeedRecord:
    """Returns the record of the runs of two with the same shapes; values count if both have few of them."""
    names = [name for name in one.values if name in other.values]
    values = {name: tuple(dict.fromkeys((*one.values[name], *other.values[name]))) for name in names}
    few = {name: seen for name, seen in values.items() if len(seen) <= MAX_VALUES}
    limits = {
        name: ends for name in {**one.limits, **other.limits} if (ends := merge_limits((one, other), name))
    }
    return FeedRecord(one.runs + other.runs, one.shapes, few, limits)


def merge_limits(feeds: Iterable[FeedRecord], name: str) -> Limits | None:
    """Returns the lowest and the highest number of an input; None if none was seen."""
    ends = [end for feed in feeds for end in feed.limits.get(name, ())]
    return (min(ends), max(ends)) if ends else None


def _is_value(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


MAX_KEPT_BYTES = 512 * 2**20
"""Maximum size of the inputs that are kept of one model by one process, in bytes."""


class InputKeeper:
    """Keeps inputs as `.npz` files of arrays by input name. Not safe for threads.

    Each run is kept as likely as any other (reservoir sampling, Vitter's algorithm R).

    Args:
        folder: Where the files go; nobody else may read it.
        prefix: First part of their names.
        limit: Maximum number of inputs.
    """

    def __init__(self, folder: Path, prefix: str, limit: int) -> None:
        self._folder, self._prefix, self._limit = folder, prefix, limit
        self._runs = 0
        self._sizes_bytes: list[int] = []  # by slot
        self._random = random.Random(0)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files."""
        return tuple(map(self._name, range(len(self._sizes_bytes))))

    def add(self, feed: Mapping[str, Array]) -> None:
        """Keeps what is fed to a run, or does not; what is no array of numbers is never kept.

        Raises:
            OSError: The disk is full.
        """
        arrays = {name: array for name, array in feed.items() if array.dtype.kind in "biuf"}
        if not arrays or len(arrays) < len(feed):
            return
        self._runs += 1
        is_full = len(self._sizes_bytes) == self._limit
        slot = self._random.randrange(self._runs) if is_full else len(self._sizes_bytes)
        sizes_bytes = [*self._sizes_bytes]
        sizes_bytes[slot : slot + 1] = [sum(array.nbytes for array in arrays.values())]
        if slot < self._limit and sum(sizes_bytes) <= MAX_KEPT_BYTES:
            # Whole or not at all, so that a process that is killed leaves no part of one.
            with new_file(self._folder / self._name(slot), durable=False) as file:
                write_tensors(Path(file.name), arrays)
            self._sizes_bytes = sizes_bytes

    def _name(self, slot: int) -> str:
        return f"{self._prefix}-{slot:04}.npz"
