"""Where requests wait for their turn, and are refused where nobody would answer them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.errors import PipelineError, PoolError, RequestTimeoutError
from pipeline.runtime.pool.futures import renew
from pipeline.runtime.pool.ledger import Request


class WouldBlock(Exception):
    """A request would have to wait, and was told not to."""


@dataclass(slots=True)
class Order:
    """How a request is to be served.

    Attributes:
        timeout_s: Seconds from now until its caller stops waiting; None for never.
        retries: How often it may be tried on another worker.
        copies: Whether its answer is to be arrays of their own, and no views of shared memory.
        may_wait: Whether to wait for room, or to raise `WouldBlock`.
        begun: When its caller began to wait; None for now.
        gives_up_at: When it stops waiting for arrays to be let go of.
    """

    timeout_s: float | None = None
    retries: int = 0
    copies: bool = False
    may_wait: bool = True
    begun: float | None = None
    gives_up_at: float = math.inf


class Gate:
    """Whether a request may come in; all but `close` and `refuse_in_callback` is called with the lock held.

    Args:
        changed: The exchange's lock, which tells of every request that ends.
        max_pending: Most requests that are not answered yet; who brings another waits.
        count_pending: Returns how many there are, but for those that are reserved.

    Attributes:
        answering: The thread that tells callers what came, and must not wait for itself.
        reserved: Requests that have their turn and are not in the books yet.
        closed_by: Why no more are taken; None if they are.
    """

    def __init__(
        self, changed: threading.Condition, max_pending: int, count_pending: Callable[[], int]
    ) -> None:
        self._changed, self._max_pending, self._count_pending = changed, max_pending, count_pending
        self._stranded: dict[str, PipelineError] = {}
        self.answering: threading.Thread | None = None
        self.reserved = 0
        self.closed_by: PipelineError | None = None

    @property
    def stranded(self) -> dict[str, PipelineError]:
        """The models that no worker serves any more, and why."""
        return dict(self._stranded)

    def require_open(self, model: str) -> None:
        """Raises if nobody would answer a request.

        Raises:
            PipelineError: The pool is closed, or no worker is left for the model.
        """
        error = self.closed_by or self._stranded.get(model)
        if error is not None:
            raise renew(error)

    def reserve(self, model: str, deadline: float, order: Order) -> None:
        """Waits until fewer than `max_pending` requests are unanswered, and counts one more.

        Raises:
            PipelineError: As `require_open`, and as `wait`.
            WouldBlock: It would have to wait, and may not.
        """
        self.require_open(model)
        while self._count_pending() + self.reserved >= self._max_pending:
            self.wait(deadline, order, f"{self._max_pending} requests before it")
            self.require_open(model)
        self.reserved += 1

    def let_go(self) -> None:
        """Takes back what `reserve` counted."""
        self.reserved -= 1

    def wait(self, deadline: float, order: Order, reason: str) -> None:
        """Waits until something changed.

        Raises:
            PoolError: This is the thread that would have to change it.
            RequestTimeoutError: The deadline passed.
            WouldBlock: It may not wait.
        """
        if not order.may_wait:
            raise WouldBlock
        self.refuse_in_callback(reason)
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise RequestTimeoutError(
                f"request did not get its turn within {order.timeout_s:g} s\n  got {reason}"
            )
        self._changed.wait(None if remaining_s == math.inf else min(remaining_s, threading.TIMEOUT_MAX))
        if not order.may_wait:
            raise WouldBlock  # its caller gave up meanwhile

    def refuse_in_callback(self, reason: str) -> None:
        """Raises if this is the thread that answers, which would wait for itself.

        Raises:
            PoolError: It is.
        """
        if threading.current_thread() is self.answering:
            raise PoolError(
                f"a future's callback would have to wait for its own pool\n  got {reason}",
                hint="call it from another thread",
            )

    def strand(self, model: str, error: PipelineError) -> None:
        """Refuses requests for a model from now on."""
        self._stranded[model] = error

    def recover(self, model: str) -> None:
        """Takes requests for a model again."""
        self._stranded.pop(model, None)

    def close(self, error: PipelineError) -> None:
        """Takes no more requests, for the first reason given; those that were taken go on."""
        with self._changed:
            self.closed_by = self.closed_by or error
            self._changed.notify_all()


def find_deadline(order: Order) -> tuple[float, float]:
    """Returns when a caller began to wait, and when it stops."""
    begun = time.monotonic() if order.begun is None else order.begun
    return begun, math.inf if order.timeout_s is None else begun + order.timeout_s


def describe_overdue(request: Request, begun: float, where: str) -> RequestTimeoutError:
    """Returns what the caller of a request is told whose deadline has passed.

    Args:
        request: The request.
        begun: When its caller began to wait.
        where: Where it is now.
    """
    return RequestTimeoutError(
        f"request to {request.model} took too long\n"
        f"  expected an answer within {request.deadline - begun:.3g} s, got none; {where}"
    )
