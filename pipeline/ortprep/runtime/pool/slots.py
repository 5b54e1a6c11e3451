"""Slots: a slot is a request's permit, its memory and its entry in the books, from its call to its answer.

`SlotTable` does the bookkeeping, without processes, clock or copies. A slot is filled by its caller, waits in
its model's queue until a worker that has the model has room for it, and is then in that worker's socket,
behind those that were sent before, until it is answered. Workers answer in the order they were asked, so when
one dies it was the oldest that it died of; those behind it go back to the front of their queue and nothing is
held against them. `docs/serving.md` draws the states.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from _thread import RLock
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ortprep.errors import PipelineError, PoolError
from ortprep.runtime.pool.memory import Region
from ortprep.runtime.pool.messages import Layout
from ortprep.runtime.tensors.element_types import Array

Answer = dict[str, Array]
"""A model's outputs by name, in the model's order."""

MAX_DEPTH = 16
"""Maximum number of requests that a worker has at once."""

NO_TENSORS = Layout(b"", (), (), 0, 0)

log = logging.getLogger(__name__)

_RESPONSE_DELAY_S = 0.002


class FutureCondition(RLock):  # type: ignore[misc]  # it can be, in CPython
    """A condition that `with` takes in one step, as it does a lock.

    The library's takes its lock in Python code. Where a signal's handler raises there, the lock stays taken,
    and the thread that resolves futures waits for ever.
    """

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()

    wait = threading.Condition.wait
    notify = threading.Condition.notify
    notify_all = threading.Condition.notify_all


class PoolFuture(Future[Answer]):
    """An answer to come; it can be cancelled as long as no worker has the request, as `withdraw` returns."""

    def __init__(self, withdraw: Callable[[], bool]) -> None:
        super().__init__()
        self._condition = FutureCondition()  # type: ignore[assignment]
        self._withdraw, self._is_over = withdraw, False

    def cancel(self) -> bool:
        """Takes the request back, unless a worker has it or it is answered; returns whether it did."""
        if self.cancelled():
            return True
        if not self._withdraw():
            return False
        self.finish_cancel()
        return True

    def finish_cancel(self) -> None:
        """Tells all that wait for a request which was taken back; more than once is once."""
        super().cancel()
        with self._condition:
            if not self._is_over:
                self.set_running_or_notify_cancel()
                self._is_over = True


@dataclass(slots=True, eq=False)
class Slot:
    """A request that is not answered yet, with its permit and its memory.

    Attributes:
        deadline: When its caller stops waiting, by `time.monotonic()`; infinite for never.
        retries: How often it may still be sent to another worker after one died of it.
        layout: Where its inputs are.
        body: What follows the head of the packet that sends it.
        region: Its memory; None where its inputs travel in the packet, unless a worker has it.
        worker: Number of the worker that has it; None while it is filled or waits.
        is_filled: Whether its caller has admitted it.
        is_abandoned: Whether its caller has stopped waiting while a worker had it.
        is_cancelled: Whether its caller took it back.
        service_s: Seconds that the run took.
        written_bytes: Bytes of its memory that inputs and outputs took.
    """

    number: int
    model: str
    deadline: float = math.inf
    retries: int = 0
    future: PoolFuture = field(default_factory=lambda: PoolFuture(lambda: False))
    begun: float = 0.0
    layout: Layout = NO_TENSORS
    body: bytes = b""
    region: Region | None = None
    worker: int | None = None
    is_filled: bool = False
    is_abandoned: bool = False
    is_cancelled: bool = False
    error: PipelineError | None = None
    answer: Answer | None = None
    service_s: float = 0.0
    written_bytes: int = 0

    def resolve(self) -> None:
        """Tells its caller what became of it; whatever callbacks of its future do stays theirs."""
        try:
            if self.is_cancelled:
                self.future.finish_cancel()
            elif self.error is not None:
                self.future.set_exception(self.error)
            else:
                self.future.set_result(self.answer or {})
        except BaseException:  # even SystemExit of a callback must not keep other callers from their answers
            log.exception("a future's callback failed")


@dataclass(slots=True)
class WorkerQueue:
    """A worker in the books: the slots that it has, the oldest first.

    Attributes:
        since: When the oldest became the oldest.
        service_s: Moving average of what a request takes it; None before the first.
        depth: How many slots it may have.
    """

    models: frozenset[str]
    is_open: bool = False
    sent: deque[Slot] = field(default_factory=deque)
    since: float = math.inf
    service_s: float | None = None
    depth: int = 2


class SlotTable:
    """The slots of a pool that are in use, and the workers that have them."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._queues: dict[str, OrderedDict[int, Slot]] = {}
        self._workers: dict[int, WorkerQueue] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def waiting(self) -> int:
        """How many slots no worker has yet."""
        return sum(map(len, self._queues.values()))

    def add_worker(self, worker: int, models: frozenset[str]) -> None:
        """Makes a worker known; it takes nothing until it is opened."""
        self._workers[worker] = WorkerQueue(models)
        for model in models:
            self._queues.setdefault(model, OrderedDict())

    def open_worker(self, worker: int) -> None:
        """Lets a worker take slots."""
        self._workers[worker].is_open = True

    def close_worker(self, worker: int) -> None:
        """Lets a worker take no more slots; it keeps those it has, and they no longer time out."""
        self._workers[worker].is_open, self._workers[worker].since = False, math.inf

    def queue_of(self, worker: int) -> WorkerQueue:
        """Returns what is known of a worker."""
        return self._workers[worker]

    # From acquired to sent.

    def acquire(self, slot: Slot) -> None:
        """Takes a slot into the books, to be filled by its caller."""
        self._slots[slot.number] = slot

    def admit(self, slot: Slot) -> None:
        """Puts a slot that is filled at the end of its model's queue."""
        slot.is_filled = True
        self._queues[slot.model][slot.number] = slot
        if slot.deadline < math.inf:
            heapq.heappush(self._deadlines, (slot.deadline, slot.number))
            if len(self._deadlines) > 64 + 2 * len(self._slots):  # most are of slots that are free
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._slots]
                heapq.heapify(self._deadlines)

    def assign(self, now: float, model: str | None = None) -> Iterator[tuple[Slot, int]]:
        """Gives waiting slots to workers that have room, and yields which to which.

        A slot goes to the worker with the fewest. Each queue is served in order, and of several the one
        whose first slot came first, so that no model waits for another's backlog.
        """
        names = (model,) if model is not None else tuple(self._queues)
        while (chosen := self._next(names)) is not None:
            slot, worker = chosen
            queue = self._workers[worker]
            if not queue.sent:
                queue.since = now
            slot.worker = worker
            queue.sent.append(slot)
            del self._queues[slot.model][slot.number]
            yield slot, worker

    def _next(self, names: tuple[str, ...]) -> tuple[Slot, int] | None:
        """Returns the oldest slot that heads a queue and can be sent, and where to."""
        heads = [next(iter(self._queues[name].values())) for name in names if self._queues[name]]
        for slot in sorted(heads, key=lambda slot: slot.number) if len(heads) > 1 else heads:
            worker = self._roomiest(slot.model)
            if worker is not None:
                return slot, worker
        return None

    def _roomiest(self, model: str) -> int | None:
        best, fewest = None, MAX_DEPTH + 1
        for number, queue in self._workers.items():
            count = len(queue.sent)
            if count < fewest and count < queue.depth and queue.is_open and model in queue.models:
                best, fewest = number, count
        return best

    # From sent to free.

    def expect(self, worker: int, number: int, *, position: int = 0) -> Slot:
        """Returns the slot that a worker answers next, or `position` slots after that.

        Raises:
            PoolError: It is another's turn.
        """
        sent = self._workers[worker].sent
        slot = sent[position] if position < len(sent) else None
        if slot is None or slot.number != number:
            expected = "none" if slot is None else slot.number
            raise PoolError(
                f"answer to the wrong request\n  expected one to request {expected}, got one to {number}"
            )
        return slot

    def answer(self, worker: int, number: int, now: float, *, service_s: float | None = None) -> Slot:
        """Frees a worker's oldest slot; raises as `expect`."""
        slot = self.expect(worker, number)
        queue = self._workers[worker]
        queue.sent.popleft()
        # One that is closed stays so.
        queue.since = now if queue.sent and queue.since < math.inf else math.inf
        if service_s is not None:
            old = queue.service_s
            queue.service_s = service_s if old is None else old + (service_s - old) / 8
            queue.depth = depth_for(queue.service_s)
        return self._slots.pop(slot.number)

    def find_waiting(self, number: int) -> Slot | None:
        """Returns a slot that waits for a worker; None if there is none such."""
        slot = self._slots.get(number)
        return slot if slot is not None and slot.worker is None and slot.is_filled else None

    def withdraw(self, number: int) -> Slot | None:
        """Frees a slot that waits, or returns None if there is none such."""
        slot = self.find_waiting(number)
        if slot is None:
            return None
        del self._queues[slot.model][number]
        return self._slots.pop(number)

    def give_up(self, slot: Slot) -> None:
        """Frees a slot that its caller could not fill."""
        self._slots.pop(slot.number, None)

    def expire(self, now: float) -> list[Slot]:
        """Returns the slots whose deadline has passed, which nobody waits for from now on.

        Those that a worker has stay in the books until it has answered or died; the others are free.
        """
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            slot = self._slots.get(heapq.heappop(self._deadlines)[1])
            if slot is None or slot.is_abandoned:
                continue
            expired.append(slot)
            if slot.worker is None:
                self.withdraw(slot.number)
            slot.is_abandoned = True
        return expired

    def next_deadline(self) -> float:
        """Returns when `expire` is to be called next; infinite for never."""
        while self._deadlines and self._deadlines[0][1] not in self._slots:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def lose(self, worker: int, *, fails_oldest: bool = True) -> list[Slot]:
        """Closes a worker that died and puts its slots back to the front of their queues, in order.

        Returns those that are free: the one it died of, unless that may be tried again, and the abandoned.
        """
        queue = self._workers[worker]
        slots = list(queue.sent)
        queue.sent.clear()
        queue.is_open, queue.since, queue.service_s, queue.depth = False, math.inf, None, depth_for(None)
        freed = [slot for slot in slots if slot.is_abandoned]
        if slots and fails_oldest and not slots[0].is_abandoned:
            slots[0].retries -= 1
            if slots[0].retries < 0:
                freed.append(slots[0])
        for slot in freed:
            del self._slots[slot.number]
        for slot in reversed(slots):
            if slot.number in self._slots:
                slot.worker = None
                self._queues[slot.model][slot.number] = slot
                self._queues[slot.model].move_to_end(slot.number, last=False)
        return freed

    def withdraw_all(self, model: str) -> list[Slot]:
        """Frees every waiting slot of a model and returns them."""
        numbers = list(self._queues.get(model, ()))
        return [slot for number in numbers if (slot := self.withdraw(number)) is not None]

    def clear(self) -> list[Slot]:
        """Frees every slot and returns them, but for those that are being filled, whose callers know."""
        slots = [slot for slot in self._slots.values() if slot.is_filled]
        self._slots.clear()
        self._deadlines.clear()
        for waiting in self._queues.values():
            waiting.clear()
        for queue in self._workers.values():
            queue.sent.clear()
            queue.is_open, queue.since = False, math.inf
        return slots

    def is_idle(self) -> bool:
        """Returns whether nobody waits for an answer."""
        return all(slot.is_abandoned for slot in self._slots.values())


def depth_for(service_s: float | None) -> int:
    """Returns how many slots a worker may have at once: two, or more where runs take under a millisecond.

    Two keep a worker busy while an answer is on its way; short runs need as many as cover the time until the
    pool's process gets to them, about 2 ms on a busy machine.
    """
    if service_s is None:
        return 2
    return max(2, min(MAX_DEPTH, math.ceil(_RESPONSE_DELAY_S / max(service_s, 1e-9))))
