"""A time limit for calls that have none of their own: all that is read from strangers' servers has one.

A socket's timeout begins again with every byte, so a server that sends one a minute never lets it pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar, cast

T = TypeVar("T")


class OutOfTimeError(Exception):
    """A call took longer than it may; the caller turns this into an error of its own."""


def call_in_time(call: Callable[[], T], limit_s: float, abort: Callable[[], object] = lambda: None) -> T:
    """Returns what a call returns, which may take so many seconds.

    It is aborted then; a call that cannot be ends by itself, in a thread that nothing waits for.

    Raises:
        OutOfTimeError: It takes longer.
    """
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
    context, is_late = copy_context(), Event()

    def run() -> None:
        try:
            result = context.run(call)
            if is_late.is_set() and hasattr(result, "close"):
                result.close()  # an answer that nobody reads
            results.put((result, None))
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            results.put((None, error))

    Thread(target=run, name="ortprep-network", daemon=True).start()
    try:
        result, error = results.get(timeout=limit_s)
    except Empty:
        is_late.set()
        with suppress(OSError, RuntimeError, ValueError):  # it ended meanwhile
            abort()
        raise OutOfTimeError(f"no progress within {limit_s:.0f} s") from None
    if error is not None:
        raise error
    return cast("T", result)
