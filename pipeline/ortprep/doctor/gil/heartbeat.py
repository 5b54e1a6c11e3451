"""A thread that ticks during a call, and the gaps in its ticks."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")

_TICK_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class Call:
    """One call, as a ticking thread saw it.

    Attributes:
        elapsed_ms: Duration of the call.
        longest_gap_ms: Longest time within it that the other thread did not run; all of it if it never did.
        ticks: Number of times that the other thread ran within it.
    """

    elapsed_ms: float
    longest_gap_ms: float
    ticks: int

    @property
    def gap_share(self) -> float:
        """Longest gap as a share of the call's duration, from 0 to 1."""
        return self.longest_gap_ms / self.elapsed_ms

    @property
    def tick_rate(self) -> float:
        """Ticks per millisecond."""
        return self.ticks / self.elapsed_ms


@dataclass(frozen=True)
class GilObservations:
    """Calls that a process observed.

    Attributes:
        onnxruntime: Version.
        phases: Calls of ONNX Runtime by phase: `load`, `initialise`, `run`; or `create`, `run`.
        released: Calls that are known to let other threads run while they keep a core busy.
    """

    onnxruntime: str
    phases: Mapping[str, tuple[Call, ...]]
    released: tuple[Call, ...]


def call_between(started_s: float, ended_s: float, ticks: Sequence[float]) -> Call:
    """Returns a call with the gaps between the ticks within it. Pure."""
    inside = [tick for tick in ticks if started_s < tick < ended_s]
    gaps = (later - earlier for earlier, later in itertools.pairwise([started_s, *inside, ended_s]))
    return Call((ended_s - started_s) * 1e3, max(gaps) * 1e3, len(inside))


class Heartbeat:
    """A thread that notes the time about every 0.6 ms while the block runs, if the interpreter lets it."""

    def __init__(self) -> None:
        self._ticks: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="ortprep-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def observe(self, work: Callable[[], T]) -> tuple[Call, T]:
        """Calls a function; returns the gaps meanwhile, and the function's result."""
        # The thread is then in its pause: a gap from before the call does not count.
        time.sleep(4 * _TICK_INTERVAL_S)
        before = len(self._ticks)
        started_s = time.perf_counter()
        value = work()
        ended_s = time.perf_counter()
        return call_between(started_s, ended_s, self._ticks[before:]), value

    def _tick(self) -> None:
        while not self._ended.is_set():
            self._ticks.append(time.perf_counter())
            # Not Event.wait, which would also wait for a lock that another thread may hold.
            time.sleep(_TICK_INTERVAL_S)
