"""What callers wait on, and how it is resolved."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from ortprep.errors import PipelineError
from ortprep.runtime.tensors.element_types import Array

Answer = dict[str, Array]
"""A model's outputs by name, in the model's order."""

log = logging.getLogger(__name__)


class PoolFuture(Future[Answer]):
    """An answer to come; it can be cancelled as long as no worker has the request, as `withdraw` returns."""

    def __init__(self, withdraw: Callable[[], bool]) -> None:
        super().__init__()
        self._withdraw = withdraw

    def cancel(self) -> bool:
        """Takes the request back, unless a worker has it or it is answered; returns whether it did."""
        if self.cancelled():
            return True
        if not self._withdraw():
            return False
        super().cancel()
        self.set_running_or_notify_cancel()
        return True


class Waiter:
    """What a thread waits on that does nothing else: a future without its machinery."""

    __slots__ = ("_answer", "_error", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._answer: Answer = {}
        self._error: BaseException | None = None

    def set_result(self, answer: Answer) -> None:
        """Ends the wait with an answer."""
        self._answer = answer
        self._lock.release()

    def set_exception(self, error: BaseException) -> None:
        """Ends the wait with an error."""
        self._error = error
        self._lock.release()

    def result(self) -> Answer:
        """Waits, once, and returns the answer or raises the error."""
        self._lock.acquire()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # else error and traceback would hold each other
        return self._answer


def clone_error(error: PipelineError) -> PipelineError:
    """Returns an equal error; one that is raised again and again drags all its tracebacks along."""
    clone = type(error)(error.message, hint=error.hint)
    clone.__dict__.update(error.__dict__)
    return clone
