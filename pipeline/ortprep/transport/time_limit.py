"""A time limit for calls that have none of their own: all that is read from strangers' servers has one.

A socket's timeout begins again with every byte, so a server that sends one a minute never lets it pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar, cast

T = TypeVar("T")


class OutOfTimeError(Exception):
    """A call took longer than it may; the caller turns this into an error of its own."""


_deadline: ContextVar[tuple[float, Exception | type[Exception]] | None] = ContextVar("deadline", default=None)


@contextmanager
def limit_time(timeout_s: float, late: Exception | type[Exception]) -> Iterator[None]:
    """Gives all calls in a block `timeout_s` seconds together; `check_time` raises `late`.

    A block within such a block has what is left of the outer one's time.
    """
    outer, inner = _deadline.get(), (time.monotonic() + timeout_s, late)
    token = _deadline.set(inner if outer is None or inner[0] < outer[0] else outer)
    try:
        yield
    finally:
        _deadline.reset(token)


def check_time() -> None:
    """Raises the error of `limit_time` once the time is over; to be called between requests and blocks."""
    deadline = _deadline.get()
    if deadline is not None and time.monotonic() >= deadline[0]:
        raise deadline[1]


def remaining_s() -> float:
    """Returns the seconds that `limit_time` leaves: 0 if they are over, infinite where nothing is limited."""
    deadline = _deadline.get()
    return math.inf if deadline is None else max(0.0, deadline[0] - time.monotonic())


def call_in_time(call: Callable[[], T], limit_s: float) -> T:
    """Returns what a call returns, which may take so many seconds, and no more than `limit_time` leaves.

    A call that takes longer ends by itself, in a thread that nothing waits for.

    Raises:
        OutOfTimeError: It takes longer.
    """
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
    context = copy_context()

    def run() -> None:
        try:
            results.put((context.run(call), None))
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            results.put((None, error))

    limit_s = min(limit_s, remaining_s())
    Thread(target=run, name="ortprep-network", daemon=True).start()
    try:
        result, error = results.get(timeout=limit_s)
    except Empty:
        raise OutOfTimeError(f"no progress within {limit_s:.0f} s") from None
    if error is not None:
        raise error
    return cast("T", result)
