"""Which request is where: bookkeeping of a pool, without processes, memory or a clock of its own.

A request waits in its model's queue until a worker that has the model has room for it; then it is in that
worker's pipe, behind those that were sent before, until it is answered. Workers answer in the order they were
asked, so when one dies it was the oldest that it died of; those behind it go back to the front of their queue
and nothing is held against them.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.errors import PoolError

_DEEPEST = 16
_COVERED_S = 0.002


@dataclass(slots=True)
class Request:
    """A request that is not answered yet.

    Attributes:
        number: Unique in the pool.
        model: Whose.
        deadline: Time at which its caller stops waiting; infinite for never.
        retries: How often it may still be sent to another worker after one died of it.
        worker: Who has it; None while it waits.
        is_abandoned: Whether its caller has stopped waiting while a worker had it.
    """

    number: int
    model: str
    deadline: float = math.inf
    retries: int = 0
    worker: int | None = None
    is_abandoned: bool = False


@dataclass(slots=True)
class Seat:
    """A worker as far as the ledger knows it.

    Attributes:
        models: Those it serves.
        is_open: Whether it takes requests.
        sent: Numbers of the requests it has, the oldest first.
        since: When the oldest became the oldest.
        service_s: What a request takes it, a moving average; None before the first.
        depth: How many requests it may have at once.
    """

    models: frozenset[str]
    is_open: bool = False
    sent: deque[int] = field(default_factory=deque)
    since: float = math.inf
    service_s: float | None = None
    depth: int = 2


@dataclass(frozen=True, slots=True)
class Loss:
    """What becomes of the requests of a worker that died.

    Attributes:
        failed: The one it died of, if that may not be tried again.
        retried: The one it died of, if it may.
        requeued: Those behind it.
        abandoned: Those nobody waits for any more.
    """

    failed: int | None
    retried: int | None
    requeued: tuple[int, ...]
    abandoned: tuple[int, ...]


class Ledger:
    """The requests of a pool and the workers they are sent to."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._queues: dict[str, OrderedDict[int, None]] = {}
        self._seats: dict[int, Seat] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """How many requests no worker has yet."""
        return sum(map(len, self._queues.values()))

    def add_worker(self, worker: int, models: frozenset[str]) -> None:
        """Makes a worker known; it takes nothing until it is opened."""
        self._seats[worker] = Seat(models)
        for model in models:
            self._queues.setdefault(model, OrderedDict())

    def open_worker(self, worker: int) -> None:
        """Lets a worker take requests."""
        self._seats[worker].is_open = True

    def close_worker(self, worker: int) -> None:
        """Lets a worker take no more requests; it keeps those it has."""
        self._seats[worker].is_open = False

    def excuse(self, worker: int) -> None:
        """Lets a worker that is being ended take no more requests, and finds it stuck no more."""
        self._seats[worker].is_open, self._seats[worker].since = False, math.inf

    def seat(self, worker: int) -> Seat:
        """Returns what is known of a worker."""
        return self._seats[worker]

    def request(self, number: int) -> Request | None:
        """Returns a request that is not answered yet."""
        return self._requests.get(number)

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

        Args:
            now: The time.
            model: Look at this model's queue alone.
        """
        names = (model,) if model is not None else tuple(self._queues)
        while (found := self._next(names)) is not None:
            number, name, worker = found
            request, seat = self._requests[number], self._seats[worker]
            if not seat.sent:
                seat.since = now
            request.worker = worker
            seat.sent.append(number)
            del self._queues[name][number]
            yield request, worker

    def _next(self, names: tuple[str, ...]) -> tuple[int, str, int] | None:
        """Returns the oldest request that heads a queue and can be sent, its model, and where to."""
        if len(names) == 1:
            queue = self._queues[names[0]]
            worker = self._roomiest(names[0]) if queue else None
            return None if worker is None else (next(iter(queue)), names[0], worker)
        heads = sorted((next(iter(self._queues[name])), name) for name in names if self._queues[name])
        for number, name in heads:
            worker = self._roomiest(name)
            if worker is not None:
                return number, name, worker
        return None

    def _roomiest(self, model: str) -> int | None:
        best, fewest = None, _DEEPEST + 1
        for number, seat in self._seats.items():
            count = len(seat.sent)
            if count < fewest and count < seat.depth and seat.is_open and model in seat.models:
                best, fewest = number, count
        return best

    def answer(self, worker: int, number: int, now: float, *, service_s: float | None = None) -> Request:
        """Takes a worker's oldest request out of the books.

        Args:
            worker: Who answered.
            number: Which request it says it was.
            now: The time.
            service_s: What the run took.

        Raises:
            PoolError: That was not its oldest.
        """
        seat = self._seats[worker]
        if not seat.sent or seat.sent[0] != number:
            oldest = seat.sent[0] if seat.sent else "none"
            raise PoolError(f"answer to the wrong request\n  expected to {oldest}, got to {number}")
        seat.sent.popleft()
        # One that is excused stays so.
        seat.since = now if seat.sent and seat.since < math.inf else math.inf
        if service_s is not None:
            old = seat.service_s
            seat.service_s = service_s if old is None else old + (service_s - old) / 8
            seat.depth = depth_for(seat.service_s)
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
        """Returns when `expire` is to be asked next; infinite for never."""
        while self._deadlines and self._deadlines[0][1] not in self._requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def stuck(self, now: float, run_timeout_s: float) -> list[int]:
        """Returns the workers that have been at one request for too long."""
        return [number for number, seat in self._seats.items() if now - seat.since >= run_timeout_s]

    def next_stuck(self, run_timeout_s: float) -> float:
        """Returns when `stuck` is to be asked next; infinite for never."""
        return min((seat.since for seat in self._seats.values()), default=math.inf) + run_timeout_s

    def lose(self, worker: int, *, blames_oldest: bool = True) -> Loss:
        """Closes a worker that died and puts its requests back to the front of their queues, in order.

        Args:
            worker: Who died.
            blames_oldest: Whether it died of the oldest of its requests.
        """
        seat = self._seats[worker]
        numbers = tuple(seat.sent)
        seat.sent.clear()
        seat.is_open, seat.since, seat.service_s, seat.depth = False, math.inf, None, depth_for(None)
        abandoned = tuple(n for n in numbers if self._requests[n].is_abandoned)
        failed = retried = None
        if numbers and blames_oldest and numbers[0] not in abandoned:
            first = self._requests[numbers[0]]
            if first.retries > 0:
                first.retries -= 1
                retried = first.number
            else:
                failed = first.number
        dropped = {*abandoned, failed}
        for number in reversed(numbers):
            request = self._requests[number]
            if number in dropped:
                del self._requests[number]
                continue
            request.worker = None
            self._queues[request.model][number] = None
            self._queues[request.model].move_to_end(number, last=False)
        requeued = tuple(n for n in numbers if n not in dropped and n != retried)
        return Loss(failed, retried, requeued, abandoned)

    def strand(self, model: str) -> list[int]:
        """Takes every waiting request of a model out of the books and returns their numbers."""
        numbers = list(self._queues.get(model, ()))
        for number in numbers:
            self.withdraw(number)
        return numbers

    def clear(self) -> None:
        """Takes every request out of the books."""
        self._requests.clear()
        self._deadlines.clear()
        for queue in self._queues.values():
            queue.clear()
        for seat in self._seats.values():
            seat.sent.clear()
            seat.is_open, seat.since = False, math.inf

    def is_idle(self) -> bool:
        """Says whether nobody waits for an answer."""
        return all(request.is_abandoned for request in self._requests.values())

    def running(self) -> list[int]:
        """Returns the oldest request of every worker that has any: what each is at."""
        return [seat.sent[0] for seat in self._seats.values() if seat.sent]


def depth_for(service_s: float | None) -> int:
    """Returns how many requests a worker may have at once: two, or more where runs take under a millisecond.

    Two keep a worker busy while an answer is on its way; short runs need as many as cover the time until the
    pool's process gets to them, about 2 ms on a busy machine.
    """
    if service_s is None:
        return 2
    return max(2, min(_DEEPEST, math.ceil(_COVERED_S / max(service_s, 1e-9))))
