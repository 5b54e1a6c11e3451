"""Who has which lane: callers wait here, in order, for a worker that has their model."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ortprep.errors import PipelineError, PoolClosedError, RequestTimeoutError
from ortprep.runtime.pool.lane import Lane
from ortprep.runtime.tensors.element_types import Array


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way.

    Attributes:
        model: Name of the model.
        arrays: The inputs by name.
        timeout_s: Seconds that its caller waits; infinite for as long as it takes.
        retries: How often it may be tried again after a worker died of it.
        begun: When its caller called, by `time.monotonic()`.
        waiter: Of the thread that waits: released once there is a lane, or an error.
        lane: The lane that it got.
        error: Why it gets none.
    """

    model: str
    arrays: Mapping[str, Array]
    timeout_s: float = math.inf
    retries: int = 0
    begun: float = field(default_factory=time.monotonic)
    waiter: threading.Lock = field(default_factory=threading.Lock)
    lane: Lane | None = None
    error: PipelineError | None = None

    @property
    def deadline(self) -> float:
        """When its caller stops waiting."""
        return self.begun + self.timeout_s

    def late(self, where: str) -> RequestTimeoutError:
        """Returns the error for a request whose deadline has passed."""
        return RequestTimeoutError(
            f"request to {self.model} took too long\n"
            f"  expected an answer within {self.timeout_s:.3g} s, got none; {where}"
        )


class Dispatcher:
    """The free lanes of a pool, and the requests that wait for one.

    A request gets a lane of the worker with the most free ones. A lane that becomes free goes to the request
    that has waited for longest of those that its worker can serve, so that no model waits for another's.

    Attributes:
        changed: Lock of all this, and of what workers say of themselves; notified of every change of theirs,
            and when nothing is left to do.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._free: dict[object, list[Lane]] = {}
        self._waiting: deque[Request] = deque()
        self._busy = 0
        self._closed_by: PipelineError | None = None
        self._is_failed = False
        self._unavailable: dict[str, PipelineError] = {}

    def acquire(self, request: Request, *, lost: Lane | None = None) -> Lane:
        """Returns a lane for a request, once there is one.

        Args:
            request: The request.
            lost: The lane that it had, whose worker died; it is put before those that wait then.

        Raises:
            PoolError: The pool is closed, or has no worker left for the model.
            RequestTimeoutError: There was none before the deadline.
        """
        try:
            try:
                has_lane = self.enter(request, is_first=lost is not None)
            finally:
                if lost is not None:  # only now: a pool that is drained must not be idle in between
                    self.release(lost)
            if not has_lane:
                left_s = min(max(0.0, request.deadline - time.monotonic()), threading.TIMEOUT_MAX)
                if not request.waiter.acquire(timeout=left_s) and self.withdraw(request):
                    raise request.late("waiting for a worker")
        except BaseException:  # an asynchronous one, too, must take no lane with it
            if not self.withdraw(request) and request.lane is not None:
                self.release(request.lane)
            raise
        if request.lane is None:
            raise request.error or self.closed_error()
        return request.lane

    def enter(self, request: Request, *, is_first: bool = False) -> bool:
        """Gives a request a lane if there is one, else has it wait; returns which. Raises `PoolError`."""
        with self.changed:
            self._require_open(request, was_taken=is_first)
            request.lane, request.error = self._take(request.model), None
            if request.lane is None:
                request.waiter = threading.Lock()
                request.waiter.acquire()
                (self._waiting.appendleft if is_first else self._waiting.append)(request)
            return request.lane is not None

    def release(self, lane: Lane) -> None:
        """Takes a lane back, and gives it to the next request."""
        request: Request | None = None
        with self.changed:
            self._busy -= 1
            free = self._free.get(lane.process)
            if free is not None:
                request = next((one for one in self._waiting if one.model in lane.worker.models), None)
                if request is None:
                    free.append(lane)
                else:
                    self._waiting.remove(request)
                    self._busy += 1
                    request.lane = lane
            if not self._busy and not self._waiting:
                self.changed.notify_all()
        if free is None:
            lane.close()
        if request is not None:
            request.waiter.release()

    def withdraw(self, request: Request) -> bool:
        """Takes a request back; returns whether it waited for a lane."""
        with self.changed:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
            if not self._busy and not self._waiting:
                self.changed.notify_all()
            return True

    def open(self, process: object, lanes: Iterable[Lane]) -> None:
        """Makes the lanes of a process known that is ready."""
        lanes = list(lanes)
        with self.changed:
            self._free[process] = []
            self._busy += len(lanes)
        for lane in lanes:
            self.release(lane)

    def retire(self, process: object) -> None:
        """Closes the lanes of a process that has ended; those in use are closed when they are released."""
        with self.changed:
            free = self._free.pop(process, [])
        for lane in free:
            lane.close()

    def in_flight(self, process: object, lanes: int) -> int:
        """Returns how many of so many lanes of a process are in use; the lock is held."""
        return lanes - len(self._free[process]) if process in self._free else 0

    def fail(self, error: PipelineError, models: Iterable[str] | None = None) -> None:
        """Refuses requests for these models from now on, of those that wait too; None for all models."""
        with self.changed:
            if models is None:
                self._closed_by, self._is_failed = self._closed_by or error, True
                failed = list(self._waiting)
            else:
                names = frozenset(models)
                self._unavailable.update(dict.fromkeys(names, error))
                failed = [one for one in self._waiting if one.model in names]
            for request in failed:
                self._waiting.remove(request)
                request.error = copy.copy(error)
            self.changed.notify_all()
        for request in failed:
            request.waiter.release()

    def close(self, error: PipelineError) -> None:
        """Takes no more requests; those that were taken go on, also where their worker dies."""
        with self.changed:
            self._closed_by = self._closed_by or error

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until no request waits or is served, and returns whether that is so."""
        with self.changed:
            return self.changed.wait_for(lambda: not self._busy and not self._waiting, timeout_s)

    def closed_error(self, otherwise: PipelineError | None = None) -> PipelineError:
        """Returns what requests of a closed pool fail with, a new one each time; or else another error."""
        return copy.copy(self._closed_by or otherwise or PoolClosedError("pool was closed"))

    @property
    def pending(self) -> int:
        """Number of requests that wait or are served."""
        return self._busy + len(self._waiting)

    def _require_open(self, request: Request, *, was_taken: bool) -> None:
        closed_by = None if was_taken and not self._is_failed else self._closed_by
        error = closed_by or self._unavailable.get(request.model)
        if error is not None:
            raise copy.copy(error)  # one that is raised again and again drags all its tracebacks along

    def _take(self, model: str) -> Lane | None:
        """Returns a free lane of the worker with the most that has a model; the lock is held."""
        able = [free for free in self._free.values() if free and model in free[0].worker.models]
        if not able:
            return None
        self._busy += 1
        return max(able, key=len).pop()
