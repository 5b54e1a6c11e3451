"""The lock of a pool's books, which are whole, or closed, whatever a signal's handler breaks off."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from ortprep.errors import PipelineError, PoolClosedError, PoolError
from ortprep.runtime.pool.process import WakeupEvent

P = ParamSpec("P")
T = TypeVar("T")
Table = TypeVar("Table", bound="Books")


def abort_if_interrupted(
    method: Callable[Concatenate[Table, P], T],
) -> Callable[Concatenate[Table, P], T]:
    """Returns a method, called with the lock held, that closes the pool if a signal breaks it off.

    A signal's handler may raise anywhere in the main thread, and again while that is handled. So the books
    are marked while they are changed, a few microseconds for a request; where they still are marked when the
    lock is free, they could contradict each other. Every request then fails with this as its reason, and none
    is left unanswered.
    """

    @functools.wraps(method)
    def guarded(self: Table, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.close_if_interrupted()
        self._is_changing = True
        try:
            result = method(self, *args, **kwargs)
        except (PipelineError, MemoryError):
            self._is_changing = False
            raise
        except BaseException as error:
            os.eventfd_write(self.wakeup.descriptor, 1)  # comes before another signal can
            self.close_if_interrupted(type(error).__name__)
            raise
        self._is_changing = False
        return result

    return guarded


class Books:
    """A lock, what waits for changes, and why there will be no more.

    Attributes:
        lock: `with` takes it in one step; a condition is Python code, which a signal may break off.
        wakeup: Wakes the supervisor.
        answering: The thread that resolves futures, and must not wait for itself.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.wakeup = WakeupEvent()
        self.answering: threading.Thread | None = None
        self._waiting: deque[threading.Lock] = deque()
        self._is_changing = False
        self._closed_by: PipelineError | None = None

    def refuse_in_callback(self, reason: str) -> None:
        """Raises `PoolError` if this is the thread that answers, which would wait for itself."""
        if threading.current_thread() is self.answering:
            raise PoolError(
                f"a future's callback would have to wait for its own pool\n  got {reason}",
                hint="call it from another thread",
            )

    def close(self, error: PipelineError) -> None:
        """Takes no more requests, for the first reason given; those that were taken go on."""
        with self.lock:
            self._closed_by = self._closed_by or error
            self.notify()

    @property
    def closed_error(self) -> PipelineError:
        """What requests of a closed pool fail with; a new one each time."""
        return clone_error(self._closed_by or PoolClosedError("pool was closed"))

    # With the lock held.

    def close_if_interrupted(self, got: str = "an exception") -> None:
        """Closes the pool if a signal's handler raised while the books were changed."""
        if self._is_changing:
            self.close(PoolError(f"request interrupted by a signal; pool closed\n  got {got}"))
            self.wakeup.stop_soon()
            self._is_changing = False

    def next_change(self, previous: threading.Lock | None = None) -> threading.Lock:
        """Returns a lock that can be taken after the next change; `previous` if there was none since."""
        if previous is not None and previous in self._waiting:
            return previous
        change = threading.Lock()
        change.acquire()
        self._waiting.append(change)
        return change

    def notify(self) -> None:
        """Wakes all that wait for a change."""
        for change in self._waiting:
            if change.locked():  # else this was broken off by a signal before
                change.release()
        self._waiting.clear()


def clone_error(error: PipelineError) -> PipelineError:
    """Returns an equal error; one that is raised again and again drags all its tracebacks along."""
    clone = type(error)(error.message, hint=error.hint)
    clone.__dict__.update(error.__dict__)
    return clone
