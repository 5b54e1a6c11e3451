"""Where callers and actors meet: requests, inputs and the ledger, under one lock.

Callers pack and send their own requests; the steward's thread takes the answers.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pipeline.cluster.serving.inputs import Inputs, Store
from pipeline.cluster.serving.packing import CALLS_AT_A_TIME, Call, Parcel, find_suspects, pack_call
from pipeline.cluster.serving.session_actor import Result
from pipeline.errors import PipelineError, PoolClosedError, PoolError, error_named
from pipeline.runtime.element_types import Array
from pipeline.runtime.pool.futures import Answer, Outcome, PoolFuture, Waiter, renew
from pipeline.runtime.pool.gate import Gate, Order, describe_overdue, find_deadline
from pipeline.runtime.pool.ledger import Ledger, Request
from pipeline.runtime.pool.requests import Signature, check_inputs

_SMALL_ANSWER = 16 * 1024


class Link(Protocol):
    """How one life of an actor is reached; never with the exchange's lock held, and nothing of it blocks."""

    name: str

    def send(self, call: Call, requests: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Makes a call: a model and its inputs for every request."""


@dataclass(slots=True)
class _Pending:
    number: int
    model: str
    future: PoolFuture | Waiter
    arrays: list[Any]
    size_bytes: int
    copies: bool
    begun: float
    alone: bool = False


@dataclass
class _Seat:
    """What is between the ledger and an actor."""

    link: Link
    waiting: deque[Parcel] = field(default_factory=deque)
    calls: deque[Call] = field(default_factory=deque)
    results: dict[int, Sequence[Result]] = field(default_factory=dict)
    sending: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Exchange:
    """The requests of a pool.

    Args:
        signatures: What the models take and give, by name.
        store: The object store.
        max_pending: Most requests that are not answered yet; who brings another waits.
        max_batch: Most requests that travel in one call.
        wake: Makes the steward look at a deadline that is earlier than those before.
    """

    signatures: Mapping[str, Signature]
    store: Store
    max_pending: int
    max_batch: int
    wake: Callable[[], None]
    ledger: Ledger = field(default_factory=Ledger)
    changed: threading.Condition = field(default_factory=threading.Condition)
    sent_bytes: int = 0
    received_bytes: int = 0

    def __post_init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._seats: dict[int, _Seat] = {}
        self.inputs = Inputs(self.store)
        self.is_broken = False
        self.gate = self._make_gate()

    def _make_gate(self) -> Gate:
        return Gate(self.changed, self.max_pending, lambda: len(self._pending))

    # What callers do.

    def submit(self, model: str, inputs: Mapping[str, Any], order: Order) -> PoolFuture:
        """Takes a request, sends it if a worker has room, and returns its future.

        Raises:
            PoolError: As `run`.
            WouldBlock: It would have to wait, and may not.
        """
        number = next(self._numbers)
        future = PoolFuture(lambda: self._withdraw(number))
        self._take(number, future, model, inputs, order)
        return future

    def run(self, model: str, inputs: Mapping[str, Any], order: Order) -> Answer:
        """Takes a request and waits for its answer.

        Raises:
            PoolError: As `PoolCalls.run`.
        """
        self.gate.refuse_in_callback("run()")
        waiter = Waiter()
        self._take(next(self._numbers), waiter, model, inputs, order)
        return waiter.result()

    def empty(self, model: str, name: str, shape: tuple[int, ...], order: Order) -> Array:
        """Returns an ordinary array: what goes to another machine is copied in any case.

        Raises:
            PoolError: The pool is closed.
        """
        del order
        with self.changed:
            self.gate.require_open(model)
        return np.empty(shape, self.signatures[model].inputs[name])

    def _take(
        self, number: int, future: PoolFuture | Waiter, model: str, inputs: Mapping[str, Any], order: Order
    ) -> None:
        begun, deadline = find_deadline(order)
        arrays = check_inputs(self.signatures[model], inputs)
        size_bytes = sum(array.nbytes for array in arrays)
        with self.changed:
            self.gate.reserve(model, deadline, order)
        try:
            kept = self.inputs.keep(self.signatures[model], arrays, size_bytes)
        except BaseException:
            with self.changed:
                self.gate.let_go()
                self.changed.notify_all()
            raise
        pending = _Pending(number, model, future, kept, size_bytes, order.copies, begun)
        with self.changed, self._whole():
            self.gate.let_go()
            self.gate.require_open(model)
            self._pending[number] = pending
            self.sent_bytes += size_bytes
            is_next = deadline < self.ledger.next_deadline()
            self.ledger.admit(Request(number, model, deadline, order.retries))
            self._assign(model)
        self.flush()
        if is_next:
            self.wake()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Gives the pool up if a signal's handler breaks off what is inside: the books could be wrong."""
        try:
            yield
        except (PipelineError, MemoryError):
            self.changed.notify_all()
            raise
        except BaseException as error:
            self.gate.close(PoolError(f"pool was interrupted at its books\n  got {type(error).__name__}"))
            self.is_broken = True
            self.wake()
            raise

    def _withdraw(self, number: int) -> bool:
        with self.changed:
            if self.ledger.withdraw(number) is None:
                return False
            del self._pending[number]
            self.changed.notify_all()
        return True

    def _assign(self, model: str | None = None) -> None:
        for request, worker in self.ledger.assign(time.monotonic(), model):
            pending = self._pending[request.number]
            parcel = Parcel(pending.number, pending.size_bytes, alone=pending.alone)
            self._seats[worker].waiting.append(parcel)

    def flush(self) -> None:
        """Makes the calls that actors have room for; called without the lock."""
        for seat in tuple(self._seats.values()):
            # Who sends looks again afterwards, so that nothing stays that was put down meanwhile.
            while seat.waiting and len(seat.calls) < CALLS_AT_A_TIME and seat.sending.acquire(blocking=False):
                try:
                    self._send_next(seat)
                finally:
                    seat.sending.release()

    def _send_next(self, seat: _Seat) -> None:
        with self.changed, self._whole():
            if len(seat.calls) >= CALLS_AT_A_TIME:
                return
            call = pack_call(seat.waiting, most=self.max_batch)
            if call is None:
                return
            seat.calls.append(call)
            found = [self._pending[number] for number in call.numbers]
            requests = [(pending.model, pending.arrays) for pending in found]
        seat.link.send(call, requests)

    # What the steward does.

    def add_worker(self, worker: int, models: Sequence[str]) -> None:
        """Makes a worker known; it takes nothing until it is opened."""
        with self.changed:
            self.ledger.add_worker(worker, frozenset(models))

    def open_worker(self, worker: int, link: Link, models: Sequence[str]) -> None:
        """Lets a worker have requests for these models."""
        with self.changed:
            self.ledger.seat(worker).models = frozenset(models)
            if worker not in self._seats:
                self._seats[worker] = _Seat(link)
            self.ledger.open_worker(worker)
            for model in models:
                self.gate.recover(model)
            self._assign()
            self.changed.notify_all()
        self.flush()

    def close_worker(self, worker: int) -> None:
        """Lets a worker have no more requests; it keeps those it has."""
        with self.changed:
            self.ledger.close_worker(worker)

    def answered(
        self, worker: int, link: Link, call: Call, results: Sequence[Result]
    ) -> tuple[list[Outcome], list[float]]:
        """Takes the answer to a call, and returns whom to tell, and how long each request took.

        One that comes before those of the calls made earlier waits for them.
        """
        told: list[tuple[_Pending, Result, int]] = []
        with self.changed:
            seat = self._seats.get(worker)
            if seat is None or seat.link is not link or call not in seat.calls:
                return [], []
            seat.results[id(call)], call.is_answered = results, True
            now = time.monotonic()
            while seat.calls and seat.calls[0].is_answered:
                done = seat.calls.popleft()
                came = seat.results.pop(id(done))
                call_bytes = sum(_size_of(result) for result in came)
                for number, result in zip(done.numbers, came, strict=True):
                    request = self.ledger.answer(worker, number, now, service_s=result[2] / 1e9)
                    pending = self._pending.pop(number)
                    if not request.is_abandoned:
                        told.append((pending, result, call_bytes))
            self._assign()
            self.changed.notify_all()
        self.flush()
        return [self._read(*one, link.name) for one in told], [now - pending.begun for pending, _, _ in told]

    def _read(self, pending: _Pending, result: Result, call_bytes: int, worker: str) -> Outcome:
        outputs, wrong, _ = result
        if outputs is None:
            said = wrong or {}
            kind = error_named(str(said.get("kind")))
            message = str(said.get("message"))
            where = "" if message.startswith(worker) else f"{worker}: "
            return Outcome(pending.future, kind(f"{where}{message}", hint=said.get("hint")))
        size_bytes = _size_of(result)
        self.received_bytes += size_bytes
        # All answers of a call are one object in the store, which a view keeps there whole.
        copies = pending.copies or 2 * size_bytes < call_bytes
        names = self.signatures[pending.model].outputs
        if len(outputs) != len(names):
            return Outcome(pending.future, PoolError(f"answer of {pending.model} has {len(outputs)} outputs"))
        return Outcome(
            pending.future,
            None,
            {
                name: array.copy() if copies or array.nbytes <= _SMALL_ANSWER else array
                for name, array in zip(names, outputs, strict=True)
            },
        )

    def refuse(self, worker: int, link: Link, call: Call, error: PipelineError) -> list[Outcome]:
        """Fails the requests of a call that came to nothing while its actor goes on."""
        said = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
        return self.answered(worker, link, call, [(None, said, 0)] * len(call.numbers))[0]

    def lose(self, worker: int, error: PipelineError, *, is_blamed: bool) -> list[Outcome]:
        """Takes back what a worker had that is gone, and returns whom to tell.

        Requests of the call that it was at may be what it died of. Those that may be tried again are, each in
        a call of its own; the others fail. Those behind go to other workers and are not held responsible.

        Args:
            worker: Who is gone.
            error: What requests fail with that it may have died of.
            is_blamed: Whether it can be a request that it died of.
        """
        outcomes = []
        with self.changed:
            seat = self._seats.pop(worker, None)
            suspects = find_suspects(seat.calls) if seat is not None and is_blamed else ()
            if seat is not None:
                seat.waiting.clear()  # a caller may be about to send what is there
            loss = self.ledger.lose(worker, blames_oldest=False)
            for number in loss.abandoned:
                self._pending.pop(number, None)
            for number in suspects:
                request = self.ledger.request(number)
                if request is None:
                    continue
                if request.retries > 0:
                    request.retries -= 1
                    self._pending[number].alone = True
                    continue
                self.ledger.withdraw(number)
                outcomes.append(Outcome(self._pending.pop(number).future, renew(error)))
            for model, reason in self.gate.stranded.items():
                outcomes += self._fail_waiting(model, reason)  # it was the last that had this model
            self._assign()
            self.changed.notify_all()
        self.flush()
        return outcomes

    def _fail_waiting(self, model: str, error: PipelineError) -> list[Outcome]:
        lost = [self._pending.pop(number) for number in self.ledger.strand(model)]
        return [Outcome(pending.future, renew(error)) for pending in lost]

    def strand(self, model: str, error: PipelineError) -> list[Outcome]:
        """Fails what waits for a model that no worker serves any more, and all that will be asked of it."""
        with self.changed:
            self.gate.strand(model, error)
            lost = self._fail_waiting(model, error)
            self.changed.notify_all()
        return lost

    def expire(self) -> list[Outcome]:
        """Returns whom to tell that their deadline has passed."""
        outcomes = []
        with self.changed:
            for request in self.ledger.expire(time.monotonic()):
                pending = self._pending[request.number]
                seat = None if request.worker is None else self._seats.get(request.worker)
                where = "waiting for a worker" if seat is None else f"{seat.link.name} has it"
                if request.worker is None:
                    del self._pending[request.number]
                outcomes.append(Outcome(pending.future, describe_overdue(request, pending.begun, where)))
            if outcomes:
                self.changed.notify_all()
        return outcomes

    def forget(self, error: PipelineError) -> None:
        """Becomes a closed exchange without requests, in a fork of its process.

        The old lock may be held by a thread that was not forked.
        """
        self.changed = threading.Condition()
        self.ledger, self._pending, self._seats = Ledger(), {}, {}
        self.gate = self._make_gate()
        self.gate.closed_by = error

    def abort(self) -> list[Outcome]:
        """Takes every request out of the books, and returns whom to tell."""
        with self.changed:
            error = self.gate.closed_by or PoolClosedError("pool was closed")
            requests = [(pending, self.ledger.request(number)) for number, pending in self._pending.items()]
            self._pending.clear()
            self._seats.clear()
            self.ledger.clear()
            self.changed.notify_all()
        return [
            Outcome(pending.future, renew(error))
            for pending, request in requests
            if request is None or not request.is_abandoned
        ]

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until every request that somebody waits for is answered, and says whether that came about."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.gate.reserved and self.ledger.is_idle(), timeout_s)

    @property
    def counts(self) -> tuple[int, int]:
        """How many requests are not answered yet, and how many of those no worker has."""
        with self.changed:
            return len(self._pending), self.ledger.waiting


def _size_of(result: Result) -> int:
    return sum(array.nbytes for array in result[0] or ())
