"""Whether a request may come in: its turn, and refusals where nobody would answer it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ortprep.errors import PipelineError, PoolError, RequestTimeoutError
from ortprep.runtime.pool.futures import clone_error


class WouldBlock(Exception):
    """A request would have to wait, and may not."""


@dataclass(slots=True)
class RequestOptions:
    """How a request is to be served; `timeout_s` and `deadline` count from its caller's call."""

    timeout_s: float | None = None
    retries: int = 0
    copy: bool = False
    may_wait: bool = True
    begun: float = field(default_factory=time.monotonic)
    gives_up_at: float = math.inf

    @property
    def deadline(self) -> float:
        """When its caller stops waiting; infinite for never."""
        return math.inf if self.timeout_s is None else self.begun + self.timeout_s


class AdmissionControl:
    """Whether a request may come in; all but `close` and `refuse_in_callback` is called with the lock held.

    Attributes:
        answering: The thread that resolves futures, and must not wait for itself.
        closed_by: Why no more are taken; None if they are.
    """

    def __init__(
        self, changed: threading.Condition, max_pending: int, count_pending: Callable[[], int]
    ) -> None:
        self._changed, self._max_pending, self._count_pending = changed, max_pending, count_pending
        self._unavailable: dict[str, PipelineError] = {}
        self.answering: threading.Thread | None = None
        self.closed_by: PipelineError | None = None

    def require_open(self, model: str) -> None:
        """Raises if the pool is closed, or no worker is left for the model."""
        error = self.closed_by or self._unavailable.get(model)
        if error is not None:
            raise clone_error(error)

    def wait_turn(self, model: str, options: RequestOptions) -> None:
        """Waits until there is room for a request; raises as `require_open` and `wait`."""
        self.require_open(model)
        while self._count_pending() >= self._max_pending:
            self.wait(options, f"{self._max_pending} requests before it")
            self.require_open(model)

    def wait(self, options: RequestOptions, reason: str) -> None:
        """Waits until something changed.

        Raises:
            PoolError: This is the thread that would have to change it.
            RequestTimeoutError: The deadline passed.
            WouldBlock: It may not wait.
        """
        if not options.may_wait:
            raise WouldBlock
        self.refuse_in_callback(reason)
        remaining_s = options.deadline - time.monotonic()
        if remaining_s <= 0:
            raise RequestTimeoutError(
                f"request did not get its turn within {options.timeout_s:g} s\n  got {reason}"
            )
        self._changed.wait(None if remaining_s == math.inf else min(remaining_s, threading.TIMEOUT_MAX))
        if not options.may_wait:
            raise WouldBlock  # its caller gave up meanwhile

    def refuse_in_callback(self, reason: str) -> None:
        """Raises `PoolError` if this is the thread that answers, which would wait for itself."""
        if threading.current_thread() is self.answering:
            raise PoolError(
                f"a future's callback would have to wait for its own pool\n  got {reason}",
                hint="call it from another thread",
            )

    def mark_unavailable(self, model: str, error: PipelineError) -> None:
        """Refuses requests for a model from now on."""
        self._unavailable[model] = error

    def close(self, error: PipelineError) -> None:
        """Takes no more requests, for the first reason given; those that were taken go on."""
        with self._changed:
            self.closed_by = self.closed_by or error
            self._changed.notify_all()
