"""The requests of a pool that are not answered yet, and what becomes of them; all under one lock.

The supervisor's thread takes the answers, copies them out and frees their slots. When a slot leaves the
books, its outcome joins a queue before anything else is done that could fail. `resolve_ended` then resolves
the futures, without the lock. The books are whole, or closed, whatever a signal's handler breaks off.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from ortprep.errors import PipelineError, PoolClosedError, PoolError, RequestTimeoutError
from ortprep.runtime.pool.memory import Region, RegionTable
from ortprep.runtime.pool.messages import Head, LayoutReader, MessageKind, encode_head
from ortprep.runtime.pool.packet_channel import PacketChannel
from ortprep.runtime.pool.slots import Slot, SlotTable
from ortprep.runtime.pool.worker_process import WakeupEvent
from ortprep.runtime.tensors.element_types import Array, is_valid_bool
from ortprep.runtime.tensors.signatures import Signature

P = ParamSpec("P")
T = TypeVar("T")
Table = TypeVar("Table", bound="RequestTable")

_MAX_KEPT_BYTES = 2**20


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


def _then_send(
    method: Callable[Concatenate[RequestTable, P], T],
) -> Callable[Concatenate[RequestTable, P], T]:
    """Returns a method, called with the lock held, after which workers get what they have room for."""

    @functools.wraps(method)
    def changed(self: RequestTable, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            result = method(self, *args, **kwargs)
            self._assign()
            self.notify()
        self._flush()
        return result

    return changed


class RequestTable:
    """The slots of a pool, at most `max_pending`; further calls block.

    Attributes:
        lock: `with` takes it in one step; a condition is Python code, which a signal may break off.
        wakeup: Wakes the supervisor.
        answering: The thread that resolves futures, and must not wait for itself.
    """

    def __init__(
        self, signatures: Mapping[str, Signature], memory: RegionTable, max_pending: int = 1024
    ) -> None:
        self.lock = threading.RLock()
        self.wakeup = WakeupEvent()
        self.answering: threading.Thread | None = None
        self.signatures, self.memory = signatures, memory
        self.slots = SlotTable()
        self._waiting: deque[threading.Lock] = deque()
        self._is_changing = False
        self._closed_by: PipelineError | None = None
        self._given_up: deque[Slot] = deque()
        self._max_pending = max_pending
        self._unavailable: dict[str, PipelineError] = {}
        self._channels: dict[int, PacketChannel] = {}
        self._ended: deque[Slot] = deque()
        self._models = {name: number for number, name in enumerate(signatures)}
        self._readers = {
            name: LayoutReader([dtype.itemsize for dtype in one.outputs.values()], f"answer of {name}")
            for name, one in signatures.items()
        }

    # How it is closed.

    def close(self, error: PipelineError) -> None:
        """Takes no more requests, for the first reason given; those that were taken go on."""
        with self.lock:
            self._closed_by = self._closed_by or error
            self.notify()

    @property
    def closed_error(self) -> PipelineError:
        """What requests of a closed pool fail with; a new one each time."""
        return copy.copy(self._closed_by or PoolClosedError("pool was closed"))

    def forget(self, error: PipelineError) -> None:
        """Becomes closed and empty, in a fork of its process, with a lock that no other thread can hold."""
        self.lock = threading.RLock()
        self.slots, self._closed_by = SlotTable(), error
        self._waiting.clear()
        self._channels.clear()
        self.memory.close(discards=False)

    def abort(self) -> None:
        """Fails every request that is not answered; workers must be gone."""
        with self.lock:
            self._end(*self.slots.clear(), error=self.closed_error)
            self._channels.clear()
            self.memory.close()
            self.notify()

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until every request that somebody waits for is answered, and returns whether all are."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        change: threading.Lock | None = None
        while True:
            with self.lock:
                self.collect()
                if self.slots.is_idle():
                    return True
                change = self.next_change(change)
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            change.acquire(timeout=min(left_s, threading.TIMEOUT_MAX))

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

    @abort_if_interrupted
    def collect(self) -> bool:
        """Frees the slots that callers gave up, and returns whether there were any."""
        has_any = False
        while self._given_up:
            slot = self._given_up.popleft()
            if not slot.is_filled:
                has_any = True
                self.slots.give_up(slot)
                self._free(slot)
        return has_any

    def _require_open(self, model: str) -> None:
        error = self._closed_by or self._unavailable.get(model)
        if error is not None:
            raise copy.copy(error)  # one that is raised again and again drags all its tracebacks along

    def _assign(self, model: str | None = None) -> None:
        """Gives waiting slots to workers that have room; each then has a region, if only for its answer."""
        pairs = self.slots.assign(time.monotonic(), model)
        while self.memory.has_free and (pair := next(pairs, None)) is not None:
            slot, worker = pair
            region = slot.region = slot.region or self.memory.take(0)
            head = encode_head(
                MessageKind.RUN,
                slot.number,
                model=self._models[slot.model],
                text_bytes=len(slot.layout.text),
                begin=region.begin,
                size=self.memory.region_bytes,
            )
            self._channels[worker].put(head + slot.body)

    def _free(self, slot: Slot) -> None:
        region, slot.region = slot.region, None
        if region is not None:
            self.memory.scrub([region])
            self.memory.release(region)

    def _end(self, *slots: Slot, error: PipelineError | None = None) -> None:
        for slot in slots:
            if not slot.is_abandoned:
                slot.error = slot.error if error is None else copy.copy(error)
                self._ended.append(slot)
        for slot in slots:
            self._free(slot)

    def _flush(self) -> None:
        """Sends what was put down for workers; called without the lock."""
        is_done = False
        try:
            # Each of them, whatever one returns.
            is_done = all([channel.flush() for channel in tuple(self._channels.values())])  # noqa: C419
        finally:
            if not is_done:
                self.wakeup.set()  # the thread then waits for room

    # What the supervisor does.

    def add_worker(self, worker: int, models: tuple[str, ...]) -> None:
        """Makes a worker known; it has no requests until `open_worker`."""
        with self.lock:
            self.slots.add_worker(worker, frozenset(models))

    @_then_send
    def open_worker(self, worker: int, channel: PacketChannel) -> None:
        """Lets a worker have requests."""
        self._channels[worker] = channel
        self.slots.open_worker(worker)

    def read(self, worker: int, head: Head, packet: memoryview, *, position: int) -> Slot:
        """Returns a slot with its answer, copied out of the packet, which may be used again then.

        `position` counts the answers that were read before it and are not taken yet.

        Raises:
            PoolError: It is no answer to the request whose turn it is.
            ValueError: A shape is none that an array can have.
        """
        slot = self.slots.expect(worker, head.number, position=position)
        region, begin = slot.region, slot.layout.slot_bytes
        layout = self._readers[slot.model].read(packet, head, self.memory.region_bytes - begin)
        slot.answer, slot.service_s = {}, head.figure / 1e9
        if region is not None:
            slot.written_bytes = begin + layout.slot_bytes
        if slot.is_abandoned or region is None:
            return slot  # nobody waits for it
        outputs = self.signatures[slot.model].outputs
        try:
            for (name, dtype), offset, shape in zip(
                outputs.items(), layout.offsets, layout.shapes, strict=True
            ):
                if layout.slot_bytes:
                    view = np.ndarray(shape, dtype, self.memory.file.memory, region.begin + begin + offset)
                else:
                    view = np.ndarray(shape, dtype, packet, offset)
                slot.answer[name] = _copy(view)
                if not is_valid_bool(slot.answer[name]):
                    raise PoolError(f"output {name!r} has a boolean that is neither 0 nor 1")
        except MemoryError:
            slot.error = PoolError("no memory for the copy of an answer")
        return slot

    @_then_send
    def done(self, worker: int, slots: Sequence[Slot]) -> list[float]:
        """Takes what a worker answered; returns how long each took, in seconds, from its caller's call."""
        now = time.monotonic()
        for slot in slots:
            self.slots.answer(worker, slot.number, now, service_s=slot.service_s)
            if slot.region is not None:
                self.memory.note_written(slot.region, slot.written_bytes)
            self._end(slot)
        return [now - slot.begun for slot in slots]

    @_then_send
    def failed(self, worker: int, number: int, error: PipelineError) -> None:
        """Takes a worker's word that a request failed; raises `PoolError` if it was none of its requests."""
        self._end(self.slots.answer(worker, number, time.monotonic()), error=error)

    @_then_send
    def lose(self, worker: int, error: PipelineError, *, fails_oldest: bool) -> None:
        """Takes back what a worker had whose process has ended.

        Its oldest request, if `fails_oldest`, fails with `error`, unless that may be tried again.
        """
        self._channels.pop(worker, None)
        sent = tuple(self.slots.queue_of(worker).sent)
        self.memory.scrub([slot.region for slot in sent if slot.region is not None])
        self._end(*self.slots.lose(worker, fails_oldest=fails_oldest), error=error)
        for slot in sent:
            if slot.region is not None and slot.region.is_for_answer:
                self._free(slot)

    def set_aside(self, worker: int, error: PipelineError) -> Region | None:
        """Returns the memory of the request that a worker is at, which is lost and may still write to it.

        The request fails with `error` if its inputs lie there.
        """
        with self.lock:
            sent = self.slots.queue_of(worker).sent
            if not sent:
                return None
            slot, region = sent[0], sent[0].region
            slot.region = None
            if slot.layout.slot_bytes:
                self.slots.answer(worker, slot.number, time.monotonic())
                self._end(slot, error=error)
            return region

    @_then_send
    def give_back(self, region: Region | None) -> None:
        """Takes memory back that was set aside."""
        if region is not None:
            self.memory.release(region)

    def mark_unavailable(self, model: str, error: PipelineError) -> None:
        """Fails what waits for a model that no worker serves any more, and all later requests for it."""
        with self.lock:
            self._unavailable[model] = error
            self._end(*self.slots.withdraw_all(model), error=error)
            self.notify()

    def resolve_ended(self) -> None:
        """Tells callers what became of their requests; called without the lock."""
        while self._ended:
            self._ended.popleft().resolve()

    def expire(self) -> None:
        """Fails the requests whose deadline has passed, and frees the slots that callers gave up."""
        with self.lock:
            self.close_if_interrupted()
            is_changed = self.collect()
            for slot in self.slots.expire(time.monotonic()):
                is_changed, where = True, f"worker {slot.worker} has it"
                if slot.worker is None:
                    where = "waiting for a worker"
                    self._free(slot)
                text = f"expected an answer within {slot.deadline - slot.begun:.3g} s, got none; {where}"
                slot.error = RequestTimeoutError(f"request to {slot.model} took too long\n  {text}")
                self._ended.append(slot)
            if is_changed:
                self.notify()


def _copy(view: Array) -> Array:
    """Returns a copy; a short one keeps the interpreter, since others would keep it for longer."""
    if view.nbytes > _MAX_KEPT_BYTES or not view.nbytes:
        return view.copy()
    return np.frombuffer(bytearray(view.data), view.dtype).reshape(view.shape)
