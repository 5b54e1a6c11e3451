"""What an application does with its models: the record of one process, and the values it fed.

`ortprep adopt` writes specs by these records. Nothing here keeps an array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord

MAX_MODELS = 256
"""Maximum number of models, each with one set of options, that one process records."""

MAX_FEEDS = 64
"""Maximum number of sets of shapes told apart per model: the frequent, the latest and the largest."""

MAX_SMALL_SIZE = 4
"""Maximum number of elements of an array whose values are remembered one by one."""

MAX_VALUES = 8
"""Maximum number of such values."""

_MAX_TEXT = 64  # characters of a string value
_MAX_EVERY_RUN = 65_536  # elements of an integer array that is looked at in every run
_FIRST_RUNS = 8  # of a set of shapes, all of them looked at
_MAX_SHARE = 0.01  # of the time of the runs

Value = int | float | str | bool

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class InputRecord:
    """What was fed to one input under one set of shapes.

    Attributes:
        minimum: Lowest finite number; None if there was no number.
        maximum: Highest finite number; None if there was no number.
        values: Every value that was seen, if they are few and the array is small.
    """

    shape: tuple[int, ...]
    minimum: int | float | None = None
    maximum: int | float | None = None
    values: tuple[bool | int | float | str, ...] = ()


@dataclass(frozen=True)
class FeedRecord:
    """Runs with the same shapes.

    Attributes:
        runs: Number of runs.
        inputs: What was fed, by input name.
    """

    runs: int
    inputs: Mapping[str, InputRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelRecord:
    """Sessions of one model with the same options in one process.

    Attributes:
        path: Absolute path of the model; None if the application gave bytes.
        saved: Name of the file beside the record that holds such bytes; None if they were too many.
        size_bytes: Size of the model file.
        modified_ns: Modification time of the model file; 0 for bytes.
        options: Session options that differ from ONNX Runtime's defaults.
        providers: Execution providers that were asked for, with their options.
        obtained: Names of the providers of the session.
        obstacle: Why `ortprep run` would give such a session no bundle; None if it would.
        inputs: Types of the inputs by name, as ONNX Runtime spells them: `tensor(float)`.
        loads: Number of sessions.
        runs: Number of runs of all of them.
        feeds: Runs by their shapes; other runs had yet other shapes.
        other_limits: Lowest and highest finite number in those other runs, by input name.
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
    loads: int
    runs: int
    feeds: tuple[FeedRecord, ...] = ()
    other_limits: Mapping[str, tuple[int | float, int | float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessRecord:
    """What one process of an application did.

    Attributes:
        pid: Process number.
        program: Names of the interpreter and of its script or module: `python app.py`.
        onnxruntime: Version of its ONNX Runtime.
        models: Models, in the order of their first session.
        lost: Sessions beyond the limits of the recorder; these are in no model.
        ended: Whether the process ended in order, so that all its runs are recorded.
    """

    pid: int
    program: str
    onnxruntime: str
    models: tuple[ModelRecord, ...]
    lost: int = 0
    ended: bool = False


class FeedObserver:
    """Collects what is fed to the sessions of one model. Not safe for threads.

    Every run costs a dictionary lookup. Values are looked at in the first runs of a set of shapes, and then
    as long as this takes less than 1 % of the time of the runs; integers of moderate size always.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.run_s = 0.0
        self.spent_s = 0.0
        self._feeds: dict[_Shapes, _Feed] = {}
        self._other: dict[str, _Values] | None = None

    def add(self, feed: Mapping[str, Any]) -> None:
        """Counts a run.

        Args:
            feed: Arrays, or shapes where the values cannot be read, by input name.
        """
        self.runs += 1
        key = tuple((name, _shape_of(value)) for name, value in feed.items())
        entry = self._feeds.get(key)
        if entry is None:
            if len(self._feeds) == MAX_FEEDS:
                self._make_room()
            entry = self._feeds[key] = _Feed({name: _Values() for name in feed})
        entry.runs += 1
        is_first = self._other is None and entry.runs <= _FIRST_RUNS
        is_cheap = is_first or self.spent_s < _MAX_SHARE * self.run_s
        for name, value in feed.items():
            if not isinstance(value, np.ndarray):
                continue
            is_small = value.dtype.kind in "iu" and value.size <= _MAX_EVERY_RUN
            if is_cheap or is_small:
                entry.values[name].widen(value)

    def _make_room(self) -> None:
        """Gives up the oldest of the least frequent sets of shapes, though never the largest one."""
        largest = max(self._feeds, key=_count_elements)
        shapes = min((key for key in self._feeds if key != largest), key=lambda key: self._feeds[key].runs)
        if self._other is None:
            self._other = {}
        for name, values in self._feeds.pop(shapes).values.items():
            self._other.setdefault(name, _Values()).include(values)

    def other_limits(self) -> dict[str, tuple[int | float, int | float]]:
        """Returns the limits of the runs whose shapes were given up, by input name."""
        inputs = list((self._other or {}).items())
        return {
            name: (values.minimum, values.maximum)
            for name, values in inputs
            if values.minimum is not None and values.maximum is not None
        }

    def observed(self) -> tuple[FeedRecord, ...]:
        """Returns what was seen, in the order of the first run of each set of shapes."""
        return tuple(
            FeedRecord(entry.runs, {name: entry.values[name].observed(shape) for name, shape in key})
            for key, entry in list(self._feeds.items())
        )


@dataclass
class _Feed:
    values: dict[str, _Values]
    runs: int = 0


class _Values:
    """Limits and, where they are few, the values of one input."""

    def __init__(self) -> None:
        self.minimum: int | float | None = None
        self.maximum: int | float | None = None
        self.distinct: set[Value] | None = set()

    def widen(self, array: np.ndarray[Any, Any]) -> None:
        if array.size == 0:
            return
        if self.distinct is not None:
            self._remember(array)
        if array.dtype.kind not in "iuf":
            return
        self._extend(*_limits(array))

    def include(self, values: _Values) -> None:
        """Takes the limits of others over, not their values."""
        self._extend(values.minimum, values.maximum)

    def _extend(self, low: int | float | None, high: int | float | None) -> None:
        if low is not None and high is not None:
            self.minimum = low if self.minimum is None else min(self.minimum, low)
            self.maximum = high if self.maximum is None else max(self.maximum, high)

    def _remember(self, array: np.ndarray[Any, Any]) -> None:
        assert self.distinct is not None
        elements = array.reshape(-1).tolist() if array.size <= MAX_SMALL_SIZE else [None]
        values = self.distinct.union(elements)
        self.distinct = values if len(values) <= MAX_VALUES and all(map(_is_value, values)) else None

    def observed(self, shape: tuple[int, ...]) -> InputRecord:
        values = (
            () if self.distinct is None else tuple(sorted(self.distinct, key=lambda v: (str(type(v)), v)))
        )
        return InputRecord(shape, self.minimum, self.maximum, values)


def _count_elements(shapes: _Shapes) -> int:
    return sum(math.prod(shape) for _, shape in shapes)


def _limits(array: np.ndarray[Any, Any]) -> tuple[int | float | None, int | float | None]:
    low, high = array.min().item(), array.max().item()
    if array.dtype.kind != "f" or (math.isfinite(low) and math.isfinite(high)):
        return low, high
    finite = array[np.isfinite(array)]
    return (finite.min().item(), finite.max().item()) if finite.size else (None, None)


def _is_value(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def _shape_of(value: Any) -> tuple[int, ...]:
    return value.shape if isinstance(value, np.ndarray) else tuple(value)
