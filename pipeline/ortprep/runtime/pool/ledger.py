"""Which request is where: bookkeeping of a pool, without processes, memory or a clock of its own.

A request waits in its model's queue until a worker that has the model has room for it; then it is in that
worker's socket, behind those that were sent before, until it is answered. Workers answer in the order they
were asked, so when one dies it was the oldest that it died of; those behind it go back to the front of their
queue and nothing is held against them.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ortprep.errors import PipelineError, PoolError
from ortprep.runtime.pool.futures import Answer, PoolFuture, Waiter
from ortprep.runtime.pool.messages import NOWHERE, Span
from ortprep.runtime.tensors.element_types import Array

log = logging.getLogger(__name__)

_MAX_DEPTH = 16
_RESPONSE_DELAY_S = 0.002


class RepeatedAnswerError(PoolError):
    """A worker answered a request twice; the one whose turn it is has no part in that."""


@dataclass(slots=True)
class Request:
    """A request that is not answered yet.

    Attributes:
        deadline: When its caller stops waiting, by `time.monotonic()`; infinite for never.
        retries: How often it may still be sent to another worker after one died of it.
        copy: Whether the answer is to be arrays of their own.
        block: Memory of its inputs; empty where they travel in the packet.
        worker: Number of the worker that has it; None while it waits.
        is_abandoned: Whether its caller has stopped waiting while a worker had it.
    """

    number: int
    model: str
    deadline: float = math.inf
    retries: int = 0
    future: PoolFuture | Waiter = field(default_factory=Waiter)
    begun: float = 0.0
    copy: bool = False
    packet: bytes = b""
    arrays: Sequence[Array] = ()
    block: Span = NOWHERE
    worker: int | None = None
    is_abandoned: bool = False
    error: PipelineError | None = None
    answer: Answer | None = None

    def resolve(self) -> None:
        """Tells its caller what became of it; whatever callbacks of its future do stays theirs."""
        try:
            if self.error is not None:
                self.future.set_exception(self.error)
            else:
                self.future.set_result(self.answer or {})
        except BaseException:  # even SystemExit of a callback must not keep other callers from their answers
            log.exception("a future's callback failed")


@dataclass(slots=True)
class WorkerQueue:
    """A worker in the ledger: the numbers of its requests, the oldest first.

    Attributes:
        answered: Number of the request that it answered last; None before the first.
        since: When the oldest became the oldest.
        service_s: Moving average of what a request takes it; None before the first.
    """

    models: frozenset[str]
    is_open: bool = False
    sent: deque[int] = field(default_factory=deque)
    answered: int | None = None
    since: float = math.inf
    service_s: float | None = None
    depth: int = 2


class Ledger:
    """The requests of a pool and the workers they are sent to."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._queues: dict[str, OrderedDict[int, None]] = {}
        self._workers: dict[int, WorkerQueue] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """How many requests no worker has yet."""
        return sum(map(len, self._queues.values()))

    def add_worker(self, worker: int, models: frozenset[str]) -> None:
        """Makes a worker known; it takes nothing until it is opened."""
        self._workers[worker] = WorkerQueue(models)
        for model in models:
            self._queues.setdefault(model, OrderedDict())

    def open_worker(self, worker: int) -> None:
        """Lets a worker take requests."""
        self._workers[worker].is_open = True

    def close_worker(self, worker: int) -> None:
        """Lets a worker take no more requests; it keeps those it has, and they no longer time out."""
        self._workers[worker].is_open, self._workers[worker].since = False, math.inf

    def queue_of(self, worker: int) -> WorkerQueue:
        """Returns what is known of a worker."""
        return self._workers[worker]

    def admit(self, request: Request) -> None:
        """Puts a request at the end of its model's queue."""
        self._requests[request.number] = request
        self._queues[request.model][request.number] = None
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.number))

    def assign(self, now: float, model: str | None = None) -> Iterator[tuple[Request, int]]:
        """Gives waiting requests to workers that have room, and yields which to which.

        A request goes to the worker with the fewest. Each queue is served in order, and of several the one
        whose first request came first, so that no model waits for another's backlog.
        """
        names = (model,) if model is not None else tuple(self._queues)
        while (chosen := self._next(names)) is not None:
            request, worker = chosen
            state = self._workers[worker]
            if not state.sent:
                state.since = now
            request.worker = worker
            state.sent.append(request.number)
            del self._queues[request.model][request.number]
            yield request, worker

    def _next(self, names: tuple[str, ...]) -> tuple[Request, int] | None:
        """Returns the oldest request that heads a queue and can be sent, and where to."""
        heads = [next(iter(self._queues[name])) for name in names if self._queues[name]]
        for number in sorted(heads):
            request = self._requests[number]
            worker = self._roomiest(request.model)
            if worker is not None:
                return request, worker
        return None

    def _roomiest(self, model: str) -> int | None:
        best, fewest = None, _MAX_DEPTH + 1
        for number, state in self._workers.items():
            count = len(state.sent)
            if count < fewest and count < state.depth and state.is_open and model in state.models:
                best, fewest = number, count
        return best

    def expect(self, worker: int, number: int, *, position: int = 0) -> Request:
        """Returns the request that a worker answers next, or `position` requests after that.

        Raises:
            RepeatedAnswerError: It is the one that it answered just before.
            PoolError: It is another's turn.
        """
        state = self._workers[worker]
        expected = state.sent[position] if position < len(state.sent) else "none"
        if expected != number:
            is_repeated = number == (state.sent[position - 1] if position else state.answered)
            raise (RepeatedAnswerError if is_repeated else PoolError)(
                f"answer to the wrong request\n  expected one to request {expected}, got one to {number}"
            )
        return self._requests[number]

    def answer(self, worker: int, number: int, now: float, *, service_s: float | None = None) -> Request:
        """Takes a worker's oldest request out of the books; raises as `expect`."""
        self.expect(worker, number)
        state = self._workers[worker]
        state.answered = state.sent.popleft()
        # One that is closed stays so.
        state.since = now if state.sent and state.since < math.inf else math.inf
        if service_s is not None:
            old = state.service_s
            state.service_s = service_s if old is None else old + (service_s - old) / 8
            state.depth = depth_for(state.service_s)
        return self._requests.pop(number)

    def withdraw(self, number: int) -> Request | None:
        """Takes a request that no worker has out of the books, or returns None if there is none such."""
        request = self._requests.get(number)
        if request is None or request.worker is not None:
            return None
        del self._queues[request.model][number]
        return self._requests.pop(number)

    def expire(self, now: float) -> list[Request]:
        """Returns the requests whose deadline has passed, which nobody waits for from now on.

        Those that a worker has stay in the books until it has answered or died.
        """
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._requests.get(heapq.heappop(self._deadlines)[1])
            if request is None or request.is_abandoned:
                continue
            expired.append(request)
            if request.worker is None:
                self.withdraw(request.number)
            request.is_abandoned = True
        return expired

    def next_deadline(self) -> float:
        """Returns when `expire` is to be called next; infinite for never."""
        while self._deadlines and self._deadlines[0][1] not in self._requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def lose(self, worker: int, *, blames_oldest: bool = True) -> list[Request]:
        """Closes a worker that died and puts its requests back to the front of their queues, in order.

        Returns those that end with it: the one it died of, unless that may be tried again, and the abandoned.
        """
        state = self._workers[worker]
        requests = [self._requests[number] for number in state.sent]
        state.sent.clear()
        state.is_open, state.since, state.service_s, state.depth = False, math.inf, None, depth_for(None)
        ended = [request for request in requests if request.is_abandoned]
        if requests and blames_oldest and not requests[0].is_abandoned:
            requests[0].retries -= 1
            if requests[0].retries < 0:
                ended.append(requests[0])
        for request in ended:
            del self._requests[request.number]
        for request in reversed(requests):
            if request.number in self._requests:
                request.worker = None
                self._queues[request.model][request.number] = None
                self._queues[request.model].move_to_end(request.number, last=False)
        return ended

    def withdraw_all(self, model: str) -> list[Request]:
        """Takes every waiting request of a model out of the books and returns them."""
        numbers = list(self._queues.get(model, ()))
        return [request for number in numbers if (request := self.withdraw(number)) is not None]

    def clear(self) -> list[Request]:
        """Takes every request out of the books and returns them."""
        requests = list(self._requests.values())
        self._requests.clear()
        self._deadlines.clear()
        for queue in self._queues.values():
            queue.clear()
        for state in self._workers.values():
            state.sent.clear()
            state.is_open, state.since = False, math.inf
        return requests

    def is_idle(self) -> bool:
        """Returns whether nobody waits for an answer."""
        return all(request.is_abandoned for request in self._requests.values())


def depth_for(service_s: float | None) -> int:
    """Returns how many requests a worker may have at once: two, or more where runs take under a millisecond.

    Two keep a worker busy while an answer is on its way; short runs need as many as cover the time until the
    pool's process gets to them, about 2 ms on a busy machine.
    """
    if service_s is None:
        return 2
    return max(2, min(_MAX_DEPTH, math.ceil(_RESPONSE_DELAY_S / max(service_s, 1e-9))))
