"""The requests of a pool that are not answered yet, and what becomes of them; all under one lock.

The supervisor's thread takes the answers, copies them out and frees their slots. When a slot leaves the
books, its outcome joins a queue before anything else is done that could fail. `resolve_ended` then resolves
the futures, without the lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ortprep.errors import NoRoomError, PipelineError, PoolClosedError, PoolError, RequestTimeoutError
from ortprep.runtime.pool.memory import Region, RegionTable
from ortprep.runtime.pool.messages import (
    HEAD_BYTES,
    IN_FILE,
    IN_SLOT,
    Head,
    MessageKind,
    PlaceReader,
    encode_head,
)
from ortprep.runtime.pool.process import PacketChannel, WakeupEvent
from ortprep.runtime.pool.slots import Answer, Slot, SlotTable
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature

_MAX_KNOWN = 1024
_MAX_KEPT_BYTES = 2**20
_NO_REGION = Region(0)


@dataclass(slots=True)
class WorkerReply:
    """A worker's answer, copied out of its packet or its slot; `error` if there was no memory for that.

    `region_bytes`: how much of its slot's region inputs and outputs took.
    """

    number: int
    elapsed_ns: int
    answer: Answer
    copied_bytes: int = 0
    region_bytes: int = 0
    error: PipelineError | None = None


class RequestTable:
    """The slots of a pool, at most `max_pending`; further calls block.

    Attributes:
        lock: The pool's lock.
        changed: Notified, with the lock held, of every slot that is freed.
        copied_in_bytes, copied_out_bytes: Bytes of inputs and outputs that were copied.
        answering: The thread that resolves futures, and must not wait for itself.
    """

    def __init__(
        self, signatures: Mapping[str, Signature], memory: RegionTable, max_pending: int = 1024
    ) -> None:
        self.signatures, self.memory = signatures, memory
        self.wakeup, self.slots = WakeupEvent(), SlotTable()
        # `with` takes this lock in one step; a condition is Python code, which a signal may break off.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.copied_in_bytes = self.copied_out_bytes = 0
        self.answering: threading.Thread | None = None
        self._max_pending = max_pending
        self._closed_by: PipelineError | None = None
        self._unavailable: dict[str, PipelineError] = {}
        self._channels: dict[int, PacketChannel] = {}
        self._ended: deque[Slot] = deque()
        self._models = {name: number for number, name in enumerate(signatures)}
        self._answer_bytes: dict[tuple[str, tuple[tuple[int, ...], ...]], int] = {}
        self._readers = {
            name: PlaceReader([dtype.itemsize for dtype in one.outputs.values()], f"answer of {name}")
            for name, one in signatures.items()
        }

    def _require_open(self, model: str) -> None:
        error = self._closed_by or self._unavailable.get(model)
        if error is not None:
            raise clone_error(error)

    def refuse_in_callback(self, reason: str) -> None:
        """Raises `PoolError` if this is the thread that answers, which would wait for itself."""
        if threading.current_thread() is self.answering:
            raise PoolError(
                f"a future's callback would have to wait for its own pool\n  got {reason}",
                hint="call it from another thread",
            )

    def close(self, error: PipelineError) -> None:
        """Takes no more requests, for the first reason given; those that were taken go on."""
        with self.lock:
            self._closed_by = self._closed_by or error
            self.changed.notify_all()

    # With the lock held.

    def _encode(self, slot: Slot) -> bytes:
        """Returns the head of the packet that sends a slot."""
        layout, region = slot.layout, slot.region or _NO_REGION
        return encode_head(
            MessageKind.RUN,
            slot.number,
            model=self._models[slot.model],
            tensors=len(layout.places),
            text_bytes=len(layout.text),
            begin=region.begin,
            size=region.size,
            figure=layout.slot_bytes,
        )

    def _assign(self, model: str | None = None) -> None:
        for slot, worker in self.slots.assign(time.monotonic(), model):
            self._channels[worker].put(slot.packet)

    def _free(self, slot: Slot) -> None:
        region, slot.region, slot.arrays = slot.region, None, ()
        if region is not None:
            self.memory.release(region)

    def _end(self, *slots: Slot, error: PipelineError | None = None) -> None:
        for slot in slots:
            if not slot.is_abandoned:
                slot.error = slot.error if error is None else clone_error(error)
                self._ended.append(slot)
        for slot in slots:
            self._free(slot)

    def _flush(self) -> None:
        """Sends what was put down for workers; called without the lock."""
        is_done = False
        try:
            is_done = _flush_all(tuple(self._channels.values()))
        finally:
            if not is_done:
                self.wakeup.set()  # the thread then waits for room

    # What the supervisor does.

    def add_worker(self, worker: int, models: tuple[str, ...]) -> None:
        """Makes a worker known; it has no requests until `open_worker`."""
        with self.lock:
            self.slots.add_worker(worker, frozenset(models))

    def open_worker(self, worker: int, channel: PacketChannel) -> None:
        """Lets a worker have requests."""
        with self.lock:
            self._channels[worker] = channel
            self.slots.open_worker(worker)
            self._assign()
            self.changed.notify_all()
        self._flush()

    def read(self, worker: int, head: Head, packet: memoryview, *, position: int) -> WorkerReply:
        """Copies out what a worker answered; the packet may be used again then.

        `position` counts the answers that were read before it and are not taken yet.

        Raises:
            PoolError: It is no answer to the request whose turn it is.
            ValueError: A shape is none that an array can have.
        """
        slot = self.slots.expect(worker, head.number, position=position)
        region, outputs = slot.region, self.signatures[slot.model].outputs
        places = self._readers[slot.model].read(packet, head, 0 if region is None else region.size)
        reply = WorkerReply(head.number, head.figure, {})
        if slot.is_abandoned:
            return reply  # nobody waits for it
        try:
            for (name, dtype), place in zip(outputs.items(), places, strict=True):
                base, offset, shape = place
                if base == IN_FILE:
                    raise PoolError("answer lies outside of its memory")
                if base == IN_SLOT and region is not None:
                    view = self.memory.file.view(region.begin + offset, dtype, shape)
                    reply.copied_bytes += view.nbytes
                    reply.region_bytes = max(reply.region_bytes, offset + view.nbytes)
                else:
                    view = np.ndarray(shape, dtype, packet, offset)
                reply.answer[name] = _copy(view)
        except MemoryError:
            reply.answer, reply.error = {}, PoolError("no memory for the copy of an answer")
        return reply

    def done(self, worker: int, replies: Sequence[WorkerReply]) -> list[float]:
        """Takes the answers of a worker; returns how long each took, in seconds, from its caller's call."""
        waited_s: list[float] = []
        with self.lock:
            now = time.monotonic()
            for reply in replies:
                slot = self.slots.answer(worker, reply.number, now, service_s=reply.elapsed_ns / 1e9)
                waited_s.append(now - slot.begun)
                slot.answer, slot.error = reply.answer, reply.error
                self._adapt(slot, max(0, reply.region_bytes - slot.layout.slot_bytes))
                self.copied_out_bytes += reply.copied_bytes
                self._end(slot)
            self._assign()
            self.changed.notify_all()
        self._flush()
        return waited_s

    def grow(self, worker: int, number: int, size: int) -> None:
        """Gives a worker's slot as much memory for its answer as the worker says that it needs.

        That may be more than the pool is to use: it then accepts no request until some is free.

        Raises:
            PoolError: It has grown already, or is none whose turn it is.
        """
        with self.lock:
            slot, now = self.slots.expect(worker, number), time.monotonic()
            is_refused = slot.is_abandoned or (slot.region is None and self.memory.is_exhausted)
            if is_refused or slot.layout.slot_bytes + size > self.memory.region_bytes:
                self.slots.answer(worker, number, now)
                self._end(slot, error=NoRoomError(f"no shared memory for an answer of {size} bytes"))
                self._channels[worker].put(encode_head(MessageKind.GROW, number))
            else:
                self.slots.grow(worker, number, now)
                slot.region = self.memory.grow(slot.region, slot.layout.slot_bytes + size)
                slot.packet = self._encode(slot) + slot.packet[HEAD_BYTES:]
                self._remember(slot, size)
                region = slot.region
                self._channels[worker].put(
                    encode_head(MessageKind.GROW, number, begin=region.begin, size=region.size)
                )
            self._assign()
            self.changed.notify_all()
        self._flush()

    def _remember(self, slot: Slot, size: int) -> None:
        """Remembers what the answer to inputs of some shapes takes, so that the next slot is large enough."""
        if len(self._answer_bytes) >= _MAX_KNOWN:
            self._answer_bytes.clear()
        self._answer_bytes[_kind_of(slot)] = size

    def _adapt(self, slot: Slot, size: int) -> None:
        """Remembers less where an answer took less than half of what was remembered."""
        if slot.region is not None and 2 * size < self._answer_bytes.get(_kind_of(slot), 0):
            self._answer_bytes[_kind_of(slot)] = size

    def failed(self, worker: int, number: int, error: PipelineError) -> None:
        """Takes a worker's word that a request failed; raises `PoolError` if it was none of its requests."""
        with self.lock:
            self._end(self.slots.answer(worker, number, time.monotonic()), error=error)
            self._assign()
            self.changed.notify_all()
        self._flush()

    def lose(self, worker: int, error: PipelineError, *, blames_oldest: bool) -> None:
        """Takes back what a worker had whose process has ended.

        Its oldest request, if it is to blame, fails with `error`, unless that may be tried again.
        """
        with self.lock:
            self._channels.pop(worker, None)
            self._end(*self.slots.lose(worker, blames_oldest=blames_oldest), error=error)
            self._assign()
            self.changed.notify_all()
        self._flush()

    def mark_unavailable(self, model: str, error: PipelineError) -> None:
        """Fails what waits for a model that no worker serves any more, and all later requests for it."""
        with self.lock:
            self._unavailable[model] = error
            self._end(*self.slots.withdraw_all(model), error=error)
            self.changed.notify_all()

    def resolve_ended(self) -> None:
        """Tells callers what became of their requests; called without the lock."""
        while self._ended:
            self._ended.popleft().resolve()

    def expire(self) -> None:
        """Fails the requests whose deadline has passed, and takes back memory that was let go."""
        with self.lock:
            is_changed = self.memory.collect()
            for slot in self.slots.expire(time.monotonic()):
                is_changed, where = True, f"worker {slot.worker} has it"
                if slot.worker is None:
                    where = "waiting for a worker"
                    self._free(slot)
                text = f"expected an answer within {slot.deadline - slot.begun:.3g} s, got none; {where}"
                slot.error = RequestTimeoutError(f"request to {slot.model} took too long\n  {text}")
                self._ended.append(slot)
            if is_changed:
                self.changed.notify_all()

    def forget(self, error: PipelineError) -> None:
        """Becomes closed and empty, in a fork of its process, with a lock that no other thread can hold."""
        self.lock = threading.RLock()
        self.changed, self.slots, self._closed_by = threading.Condition(self.lock), SlotTable(), error
        self._channels.clear()
        self.memory.close(discards=False)

    @property
    def closed_error(self) -> PipelineError:
        """What requests of a closed pool fail with; a new one each time."""
        return clone_error(self._closed_by or PoolClosedError("pool was closed"))

    def abort(self) -> None:
        """Fails every request that is not answered; workers must be gone."""
        with self.lock:
            self._end(*self.slots.clear(), error=self.closed_error)
            self._channels.clear()
            self.memory.close()
            self.changed.notify_all()

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until every request that somebody waits for is answered, and returns whether all are."""
        with self.lock:
            return self.changed.wait_for(self.slots.is_idle, timeout_s)


def _kind_of(slot: Slot) -> tuple[str, tuple[tuple[int, ...], ...]]:
    return slot.model, tuple([place.shape for place in slot.layout.places])


def _copy(view: Array) -> Array:
    """Returns a copy; a short one keeps the interpreter, since others would keep it for longer."""
    if view.nbytes > _MAX_KEPT_BYTES or not view.nbytes:
        return view.copy()
    return np.frombuffer(bytearray(view.data), view.dtype).reshape(view.shape)


def _flush_all(channels: Sequence[PacketChannel]) -> bool:
    return all([channel.flush() for channel in channels])  # noqa: C419 - each of them, whatever one returns


def clone_error(error: PipelineError) -> PipelineError:
    """Returns an equal error; one that is raised again and again drags all its tracebacks along."""
    clone = type(error)(error.message, hint=error.hint)
    clone.__dict__.update(error.__dict__)
    return clone
