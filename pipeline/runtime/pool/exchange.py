"""Where callers and workers meet: requests, blocks of shared memory and the ledger, under one lock.

Callers write their own requests into pipes, and the supervisor's thread takes the answers: between the two
there is no queue but the ledger's.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import PipelineError, PoolClosedError, PoolError
from pipeline.runtime.element_types import Array
from pipeline.runtime.pool.arena import Arena, ArenaUse, Block, NoRoomError
from pipeline.runtime.pool.futures import Answer, Outcome, PoolFuture, Waiter, renew
from pipeline.runtime.pool.gate import Gate, Order, WouldBlock, describe_overdue, find_deadline
from pipeline.runtime.pool.leases import Lease
from pipeline.runtime.pool.ledger import Ledger, Request
from pipeline.runtime.pool.requests import Layout, LayoutPlanner, Signature, check_inputs, write_request
from pipeline.runtime.pool.segments import view_tensor
from pipeline.runtime.pool.tensor_headers import HERE, TAKEN_AT, HeaderReader, TensorHeader
from pipeline.runtime.pool.wire import NOWHERE, Frame, Kind, Span, encode_frame

_SMALL_ANSWER = 16 * 1024
_REMEMBERED = 1024
_SHARE_OF_MESSAGES = 0.75
_LETTING_GO_S = 1.0
"""Seconds to wait for arrays to be let go of, where nothing else can make room."""


@dataclass(slots=True)
class _Pending:
    number: int
    model: str
    future: PoolFuture | Waiter
    message: Block
    request: Span
    answer: Span
    answer_block: Block | None
    arrays: list[Array]
    shapes: tuple[Any, ...]
    copies: bool
    begun: float
    is_unsized: bool
    is_lent: bool = False


@dataclass(slots=True)
class Answered:
    """What came of a worker's answers.

    Attributes:
        outcomes: Whom to tell.
        waited_s: How long each request took, from its caller's call.
        error: What was wrong with one, after which the worker must not be believed.
        is_told: Whether the request that this concerns is among the outcomes; else it is the worker's oldest.
    """

    outcomes: list[Outcome]
    waited_s: list[float]
    error: PoolError | None
    is_told: bool = False


@dataclass(frozen=True)
class Wires:
    """How an exchange reaches workers and their supervisor.

    Attributes:
        send: Puts frames down for a worker; called with the lock held, which makes their order.
        flush: Writes what was put down; called without the lock.
        watch: Makes the supervisor wake up at a deadline, if it would not anyway.
        ring: Makes it wake up now; takes no lock.
        stop: Makes it end the pool; takes no lock.
    """

    send: Callable[[int, bytes], None]
    flush: Callable[[], None]
    watch: Callable[[float], None]
    ring: Callable[[], None]
    stop: Callable[[], None]


@dataclass
class Copied:
    """Bytes of tensors that were copied on the way in and out."""

    in_bytes: int = 0
    out_bytes: int = 0


@dataclass
class Exchange:
    """The requests of a pool.

    Args:
        signatures: What the models take and give, by name.
        arena: The shared memory.
        wires: How it reaches workers.
        max_pending: Most requests that are not answered yet; who brings another waits.
    """

    signatures: Mapping[str, Signature]
    arena: Arena
    wires: Wires
    max_pending: int
    copied: Copied = field(default_factory=Copied)
    ledger: Ledger = field(default_factory=Ledger)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._unsized = 0  # requests whose answers' sizes were not known when they came
        self._coming = 0  # those of them that are being written, and answers that are being read
        self._sizes: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._places: dict[int, dict[str, int]] = {}
        self._waiting_for_memory: OrderedDict[int, int] = OrderedDict()
        self._planner = LayoutPlanner(self.arena)
        self._readers = {name: AnswerReader(signature) for name, signature in self.signatures.items()}
        self._outputs = {name: tuple(signature.outputs) for name, signature in self.signatures.items()}
        self.gate = self._make_gate()

    def _make_gate(self) -> Gate:
        return Gate(self.changed, self.max_pending, lambda: len(self._pending))

    # What callers do.

    def submit(self, model: str, inputs: Mapping[str, Any], order: Order) -> PoolFuture:
        """Takes a request, hands it to a worker if one has room, and returns its future.

        Raises:
            PoolError: As `run`.
            WouldBlock: It would have to wait, and may not.
        """
        number = next(self._numbers)
        future = PoolFuture(lambda: self._withdraw(number))
        self._send(number, future, model, inputs, order)
        return future

    def run(self, model: str, inputs: Mapping[str, Any], order: Order) -> Answer:
        """Takes a request and waits for its answer.

        Raises:
            PoolError: As `SessionPool.run`.
        """
        self.gate.refuse_in_callback("run()")
        waiter = Waiter()
        self._send(next(self._numbers), waiter, model, inputs, order)
        return waiter.result()

    def _send(
        self, number: int, future: PoolFuture | Waiter, model: str, inputs: Mapping[str, Any], order: Order
    ) -> None:
        """Takes a request, and hands it to a worker if one has room.

        Raises:
            InvalidRequestError: The inputs are not the model's.
            PoolError: The pool is closed, has no worker left for the model, or no shared memory.
            RequestTimeoutError: The deadline passed before there was room for the request.
            WouldBlock: It would have to wait, and may not.
        """
        begun, deadline = find_deadline(order)
        arrays = check_inputs(self.signatures[model], inputs)
        shapes = (model, *(array.shape for array in arrays))
        with self.changed:
            self.gate.reserve(model, deadline, order)
            try:
                layout = self._planner.plan(arrays, shapes)
                message, answer_block = self._allocate(layout, shapes, deadline, order)
            except BaseException:
                self.gate.let_go()
                self.changed.notify_all()
                raise
            self._coming += 1
            is_unsized = shapes not in self._sizes
            self._unsized += is_unsized
        segment, offset, size = message.span
        rest = Span(segment, offset + layout.size, size - layout.size)
        pending = _Pending(
            number=number,
            model=model,
            future=future,
            message=message,
            request=Span(segment, offset, layout.size),
            answer=rest if answer_block is None else answer_block.span,
            answer_block=answer_block,
            arrays=arrays,
            shapes=shapes,
            copies=order.copies,
            begun=begun,
            is_unsized=is_unsized,
        )
        try:
            copied = write_request(layout, arrays, message)
        except BaseException:
            with self.changed:
                self.gate.let_go()
                self._coming -= 1
                self._give_back(pending)
            raise
        with self.changed, self._whole():
            self.gate.let_go()
            self._coming -= 1
            self.copied.in_bytes += copied
            self._admit(pending, deadline, order)
        self.wires.flush()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Gives the pool up if what is inside is broken off: the books could contradict each other.

        A signal's handler may raise anywhere in the main thread. That is rare here, a few microseconds for a
        request; then every request fails with this as its reason, and none is left unanswered.
        """
        try:
            yield
        except (PipelineError, WouldBlock, MemoryError):
            raise
        except BaseException as error:
            self.gate.close(PoolError(f"pool was interrupted at its books\n  got {type(error).__name__}"))
            self.wires.stop()
            raise

    def _admit(self, pending: _Pending, deadline: float, order: Order) -> None:
        try:
            self.gate.require_open(pending.model)
        except PipelineError:
            self._give_back(pending)
            raise
        self._pending[pending.number] = pending
        is_next = deadline < self.ledger.next_deadline()
        self.ledger.admit(Request(pending.number, pending.model, deadline, order.retries))
        self._assign(pending.model)
        if is_next:
            self.wires.watch(deadline)

    def empty(self, model: str, name: str, shape: tuple[int, ...], order: Order) -> Array:
        """Returns an array in shared memory, for a producer to fill.

        Raises:
            PoolError: There is no shared memory for it, or the pool is closed.
            RequestTimeoutError: There was none before the deadline.
        """
        dtype = self.signatures[model].inputs[name]
        size = math.prod(shape) * dtype.itemsize
        _, deadline = find_deadline(order)
        with self.changed:
            self.gate.require_open(model)
            while (block := self._try_allocate(max(size, 1))) is None:
                self._wait_for_memory(size, deadline, order)
                self.gate.require_open(model)
        self.wires.flush()
        return view_tensor(Lease(block, self.arena.notes).bytes(0, size), dtype, shape)

    def _wait_for_memory(self, size: int, deadline: float, order: Order) -> None:
        """Waits until there may be more; where no answer is to come, a moment for arrays that are let go."""
        self.arena.notes.awaited_by = self.wires.ring
        if self.arena.collect():
            return  # some was left just before
        if self._pending or self._coming:
            order.gives_up_at = math.inf
            self.gate.wait(deadline, order, "no shared memory free")
            return
        now = time.monotonic()
        if order.gives_up_at == math.inf:
            order.gives_up_at = now + _LETTING_GO_S
        if now >= order.gives_up_at or not order.may_wait:
            raise NoRoomError(
                f"shared memory is full\n"
                f"  expected {size} bytes free of {self.arena.max_bytes}, got the rest held by arrays in use",
                hint="let go of answers, or ask for copies: run(…, copy=True)",
            )
        self.gate.refuse_in_callback("no shared memory free")
        self.changed.wait(max(0.0, min(order.gives_up_at, deadline) - now))
        if time.monotonic() >= deadline:
            self.gate.wait(deadline, order, "no shared memory free")

    def _allocate(
        self, layout: Layout, shapes: tuple[Any, ...], deadline: float, order: Order
    ) -> tuple[Block, Block | None]:
        """Returns memory for a request, and for its answer where its size is known and is not small."""
        expected = self._sizes.get(shapes)
        inline = 0 if expected is None or expected > _SMALL_ANSWER else expected
        while True:
            # While there are requests whose answers' sizes are not known, some memory is left for those.
            leave_some = expected is None or self._unsized > 0
            message = self._try_allocate(layout.size + inline, leave_some=leave_some)
            if message is not None:
                if expected is None or inline:
                    return message, None
                answer = self._try_allocate(expected, leave_some=self._unsized > 0)
                if answer is not None:
                    return message, answer
                # Not held while this waits: two that wait for each other would wait for ever. Nobody saw it
                # taken, so nobody is woken: two that wait would wake each other without end.
                self.arena.release(message)
            self._wait_for_memory(layout.size + (expected or 0), deadline, order)
            self.gate.require_open(shapes[0])

    def _try_allocate(self, size: int, *, leave_some: bool = False) -> Block | None:
        if leave_some and (self._pending or self._coming):
            self.arena.collect()
            used = self.arena.use.used_bytes
            if used and used + size > self.arena.max_bytes * _SHARE_OF_MESSAGES:
                return None
        try:
            return self.arena.allocate(size)
        except NoRoomError:
            if not self._pending and not self._coming:
                raise
            return None
        finally:
            if self.arena.has_removed:
                self._tell_removed()

    def _tell_removed(self) -> None:
        removed = self.arena.take_removed()
        if removed:
            frames = b"".join(encode_frame(Frame(Kind.FORGET, request=number)) for number in removed)
            for worker in self._places:
                if self.ledger.seat(worker).is_open:
                    self.wires.send(worker, frames)

    def _withdraw(self, number: int) -> bool:
        with self.changed:
            if self.ledger.withdraw(number) is None:
                return False
            self._give_back(self._pending.pop(number))
        self.wires.flush()
        return True

    # With the lock held.

    def _assign(self, model: str | None = None) -> None:
        now = time.monotonic()
        for request, worker in self.ledger.assign(now, model):
            pending = self._pending[request.number]
            position = self._places[worker][request.model]
            frame = Frame(Kind.RUN, position, request.number, pending.request, pending.answer)
            self.wires.send(worker, encode_frame(frame))

    def _give_back(self, pending: _Pending) -> None:
        """Takes a request's memory back, and lets those know who wait for some."""
        self._free(pending)
        self._serve_memory()
        self.changed.notify_all()

    def _free(self, pending: _Pending) -> None:
        self.arena.release(pending.message)
        if pending.answer_block is not None:
            self.arena.release(pending.answer_block)
        pending.arrays = []
        self._unsized -= pending.is_unsized
        pending.is_unsized = False

    def _serve_memory(self) -> None:
        """Answers the workers that need memory for an answer, as far as there is some or never will be."""
        for number, size in list(self._waiting_for_memory.items()):
            request, pending = self.ledger.request(number), self._pending.get(number)
            if request is None or request.worker is None or pending is None:
                del self._waiting_for_memory[number]
                continue
            try:
                block, is_hopeless = self._try_allocate(size), self._nobody_runs()
            except PoolError:
                block, is_hopeless = None, True
            if block is not None:
                self._grant(pending, request.worker, block)
            elif is_hopeless:
                self.wires.send(request.worker, encode_frame(Frame(Kind.DENY, request=number)))
            else:
                continue
            del self._waiting_for_memory[number]

    def _grant(self, pending: _Pending, worker: int, block: Block) -> None:
        if pending.answer_block is not None:
            self.arena.release(pending.answer_block)
        pending.answer_block, pending.answer = block, block.span
        self.wires.send(worker, encode_frame(Frame(Kind.GRANT, 0, pending.number, NOWHERE, block.span)))

    def _nobody_runs(self) -> bool:
        """Whether every worker that has something to do waits for memory, so that none will be freed."""
        return not self._coming and all(n in self._waiting_for_memory for n in self.ledger.running())

    # What the supervisor does.

    def add_worker(self, worker: int, models: tuple[str, ...]) -> None:
        """Makes a worker known with its models, in the order it knows them by."""
        with self.changed:
            self.ledger.add_worker(worker, frozenset(models))
            self._places[worker] = {model: position for position, model in enumerate(models)}

    def open_worker(self, worker: int) -> None:
        """Lets a worker have requests."""
        with self.changed:
            self.ledger.open_worker(worker)
            self._assign()
            self.changed.notify_all()
        self.wires.flush()

    def done(self, worker: int, frames: list[Frame]) -> Answered:
        """Takes the answers of a worker, up to the first that is to none of its requests."""
        answered = Answered([], [], None)
        large: list[tuple[_Pending, Frame]] = []
        with self.changed:
            now = time.monotonic()
            try:
                for frame in frames:
                    request = self.ledger.answer(worker, frame.request, now, service_s=frame.extra / 1e9)
                    pending = self._pending.pop(frame.request)
                    answered.waited_s.append(now - pending.begun)
                    self.copied.out_bytes += frame.second.size
                    if request.is_abandoned:
                        self._free(pending)
                    elif pending.copies and frame.first.size > _SMALL_ANSWER:
                        large.append((pending, frame))
                    else:
                        self._read_answer(pending, frame, answered)
                        self._settle(pending)
            except PoolError as wrong:
                answered.error = wrong
            self._coming += len(large)
            self._assign()
            if self._waiting_for_memory:
                self._serve_memory()
            self.changed.notify_all()
        self.wires.flush()
        for pending, frame in large:  # copies that take long, without keeping the others from the lock
            self._read_answer(pending, frame, answered)
            with self.changed:
                self._coming -= 1
                self._settle(pending)
                self._serve_memory()
                self.changed.notify_all()
            self.wires.flush()
        return answered

    def _settle(self, pending: _Pending) -> None:
        if pending.is_lent:
            pending.answer_block = None  # it is its holder's now
        self._free(pending)

    def _read_answer(self, pending: _Pending, frame: Frame, answered: Answered) -> None:
        try:
            outcome = Outcome(pending.future, None, self._collect(pending, frame))
        except MemoryError:  # this process's own trouble
            outcome = Outcome(pending.future, PoolError("no memory for an answer"))
        except Exception as error:  # noqa: BLE001 - whatever the worker wrote, it must not end the thread that reads it
            wrong = error if isinstance(error, PoolError) else PoolError(f"unreadable answer\n  {error}")
            outcome = Outcome(pending.future, wrong)
            answered.error, answered.is_told = answered.error or wrong, True
        answered.outcomes.append(outcome)

    def _collect(self, pending: _Pending, frame: Frame) -> Answer:
        headers = self._check_answer(pending, frame)
        size = frame.first.size
        if self._sizes.get(pending.shapes) != size:
            self._remember(pending.shapes, size)
        names = self._outputs[pending.model]
        block, begin = pending.answer_block or pending.message, frame.first.offset
        views = {
            name: view_tensor(block.part(begin + header.offset, header.size), header.dtype, header.shape)
            for name, header in zip(names, headers, strict=True)
        }
        # Behind a request there is a small answer, for which its inputs are not to be held.
        if pending.answer_block is None or pending.copies or size <= _SMALL_ANSWER:
            if size > _SMALL_ANSWER:
                self.copied.out_bytes += sum(view.nbytes for view in views.values())
            return {name: view.copy() for name, view in views.items()}
        lease = Lease(block, self.arena.notes)
        pending.is_lent = True
        inside = begin - block.span.offset
        return {
            name: view_tensor(lease.bytes(inside + header.offset, header.size), header.dtype, header.shape)
            for name, header in zip(names, headers, strict=True)
        }

    def _check_answer(self, pending: _Pending, frame: Frame) -> tuple[TensorHeader, ...]:
        """Returns the headers of an answer; they were written by a process that may not be trusted."""
        _check_inside(frame.first, pending.answer)
        block = pending.answer_block or pending.message
        headers = self._readers[pending.model].read(block.part(frame.first.offset, frame.first.size))
        if any(header.offset + header.size > frame.first.size for header in headers):
            raise PoolError(f"answer of {pending.model} lies outside of its memory")
        return headers

    def _remember(self, shapes: tuple[Any, ...], size: int) -> None:
        with self.changed:
            self._sizes[shapes] = size
            if len(self._sizes) > _REMEMBERED:
                self._sizes.popitem(last=False)

    def failed(self, worker: int, number: int, error: PipelineError) -> Outcome | None:
        """Takes a worker's word that a request failed, and returns whom to tell.

        Raises:
            PoolError: That was none of its requests.
        """
        with self.changed:
            request = self.ledger.answer(worker, number, time.monotonic())
            pending = self._pending.pop(number)
            self._waiting_for_memory.pop(number, None)
            self._assign()
            self._give_back(pending)
        self.wires.flush()
        return None if request.is_abandoned else Outcome(pending.future, error)

    def need(self, worker: int, number: int, size: int) -> None:
        """Gives a worker memory for an answer, now or when there is some, or tells it that there is none.

        Raises:
            PoolError: That was none of its requests.
        """
        with self.changed:
            request = self.ledger.request(number)
            if request is None or request.worker != worker:
                raise PoolError(f"memory wanted for a request of another\n  got {number}")
            self._waiting_for_memory[number] = size
            self._serve_memory()
        self.wires.flush()

    def lose(self, worker: int, error: PipelineError, *, is_blamed: bool) -> list[Outcome]:
        """Takes back what a dead worker had, and returns whom to tell.

        Args:
            worker: Who died; it writes no more.
            error: What its oldest request fails with, unless that may be tried again.
            is_blamed: Whether that is what it died of, if it had begun with it.
        """
        outcomes = []
        with self.changed:
            numbers = list(self.ledger.seat(worker).sent)
            for number in numbers:
                self._waiting_for_memory.pop(number, None)
            begun = bool(numbers) and self._was_begun(self._pending[numbers[0]])
            loss = self.ledger.lose(worker, blames_oldest=is_blamed and begun)
            for number in numbers:
                if number == loss.retried or number in loss.requeued:
                    self._mark_new(self._pending[number])
                    continue
                lost = self._pending.pop(number, None)
                if lost is None:
                    continue
                self._free(lost)
                if number == loss.failed:
                    outcomes.append(Outcome(lost.future, error))
            self._assign()
            self._serve_memory()
            self.changed.notify_all()
        self.wires.flush()
        return outcomes

    def _was_begun(self, pending: _Pending) -> bool:
        return bool(pending.message.part(pending.request.offset + TAKEN_AT, 1)[0])

    def _mark_new(self, pending: _Pending) -> None:
        pending.message.part(pending.request.offset + TAKEN_AT, 1)[0] = 0

    def strand(self, model: str, error: PipelineError) -> list[Outcome]:
        """Fails what waits for a model that no worker serves any more, and all that will be asked of it."""
        with self.changed:
            self.gate.strand(model, error)
            pendings = [self._pending.pop(number) for number in self.ledger.strand(model)]
            for pending in pendings:
                self._free(pending)
            self._serve_memory()
            self.changed.notify_all()
        self.wires.flush()
        return [Outcome(pending.future, renew(error)) for pending in pendings]

    def expire(self) -> list[Outcome]:
        """Returns whom to tell that their deadline has passed; and takes back memory that was let go."""
        outcomes = []
        with self.changed:
            if self.arena.collect():
                self._serve_memory()
                self.changed.notify_all()
            for request in self.ledger.expire(time.monotonic()):
                pending = self._pending[request.number]
                where = (
                    "waiting for a worker" if request.worker is None else f"worker {request.worker} has it"
                )
                if request.worker is None:
                    self._give_back(self._pending.pop(request.number))
                outcomes.append(Outcome(pending.future, describe_overdue(request, pending.begun, where)))
            if outcomes:
                self.changed.notify_all()
        self.wires.flush()
        return outcomes

    def forget(self, error: PipelineError) -> threading.Condition:
        """Becomes a closed exchange without requests, in a fork of its process; returns its new lock.

        The old one may be held by a thread that was not forked.
        """
        self.changed = threading.Condition()
        self.ledger, self._pending, self._coming = Ledger(), {}, 0
        self.gate = self._make_gate()
        self.gate.closed_by = error
        self.arena.notes.close()
        return self.changed

    @property
    def closed_error(self) -> PipelineError:
        """What requests of a closed pool fail with; a new one each time."""
        return renew(self.gate.closed_by or PoolClosedError("pool was closed"))

    def abort(self) -> list[Outcome]:
        """Takes every request out of the books, and returns whom to tell; workers must be gone."""
        outcomes = []
        with self.changed:
            for number in list(self._pending):
                request, pending = self.ledger.request(number), self._pending.pop(number)
                self._free(pending)
                if request is None or not request.is_abandoned:
                    outcomes.append(Outcome(pending.future, self.closed_error))
            self.ledger.clear()
            self._waiting_for_memory.clear()
            self.changed.notify_all()
        return outcomes

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until every request that somebody waits for is answered, and says whether that came about."""
        with self.changed:
            return self.changed.wait_for(
                lambda: not self.gate.reserved and not self._coming and self.ledger.is_idle(), timeout_s
            )

    @property
    def memory(self) -> ArenaUse:
        """How much shared memory there is."""
        with self.changed:
            self.arena.collect()
            return self.arena.use

    @property
    def counts(self) -> tuple[int, int]:
        """How many requests are not answered yet, and how many of those no worker has."""
        with self.changed:
            return len(self._pending), self.ledger.waiting


class AnswerReader(HeaderReader):
    """Reads the headers of a model's answers.

    Args:
        signature: Of the model.
    """

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self._signature = signature

    def decode(self, text: bytes) -> tuple[TensorHeader, ...]:
        """Returns headers that are those of the model's outputs.

        Raises:
            PoolError: They are others.
        """
        headers = super().decode(text)
        expected = list(enumerate(self._signature.outputs.values()))
        if [(header.position, header.dtype) for header in headers] != expected or any(
            header.segment != HERE for header in headers
        ):
            raise PoolError(
                f"answer of {self._signature.model} has other outputs than the model\n"
                f"  expected {len(expected)}, got {[str(header.dtype) for header in headers]}"
            )
        return headers


def _check_inside(span: Span, outer: Span) -> None:
    inside = (
        span.segment == outer.segment
        and span.offset >= outer.offset
        and span.offset + span.size <= outer.offset + outer.size
    )
    if not inside:
        raise PoolError(f"answer lies outside of its memory\n  expected inside {outer}, got {span}")
