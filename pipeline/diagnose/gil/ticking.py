"""A thread that ticks, and what became of it while a call went on."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")

_PAUSE_S = 0.0005


@dataclass(frozen=True)
class Call:
    """One call, as a ticking thread saw it.

    Attributes:
        elapsed_ms: How long it took.
        longest_gap_ms: Longest time within it that the other thread did not run; all of it if it never did.
        ticks: How often the other thread ran within it.
    """

    elapsed_ms: float
    longest_gap_ms: float
    ticks: int


def call_between(started_s: float, ended_s: float, ticks: Sequence[float]) -> Call:
    """Returns what ticks tell of a call. Pure.

    Args:
        started_s: When it began.
        ended_s: When it returned.
        ticks: When the other thread ran, in order; those outside the call do not count.
    """
    inside = [tick for tick in ticks if started_s < tick < ended_s]
    gaps = (later - earlier for earlier, later in itertools.pairwise([started_s, *inside, ended_s]))
    return Call((ended_s - started_s) * 1e3, max(gaps) * 1e3, len(inside))


class Ticker:
    """A thread that notes the time about every 0.6 ms while the block runs, if the interpreter lets it."""

    def __init__(self) -> None:
        self._ticks: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="ortprep-ticker", daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def observe(self, work: Callable[[], T]) -> tuple[Call, T]:
        """Calls a function; returns how the ticking thread fared meanwhile, and what it returned."""
        # So that the thread is in its pause, and is not counted as starved by what went before.
        time.sleep(4 * _PAUSE_S)
        before = len(self._ticks)
        started_s = time.perf_counter()
        value = work()
        ended_s = time.perf_counter()
        return call_between(started_s, ended_s, self._ticks[before:]), value

    def _tick(self) -> None:
        while not self._ended.is_set():
            self._ticks.append(time.perf_counter())
            # Not Event.wait: a lock that another thread may hold is one more thing to be waited for.
            time.sleep(_PAUSE_S)
