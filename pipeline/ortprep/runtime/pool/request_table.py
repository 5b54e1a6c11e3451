"""The requests of a pool that are not answered yet, and what becomes of them; all under one lock.

The supervisor's thread takes the answers, copies them out and frees their slots. When a slot leaves the
books, its outcome joins a queue before anything else is done that could fail. `resolve_ended` then resolves
the futures, without the lock.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from ortprep.errors import NoRoomError, PipelineError, PoolError, RequestTimeoutError
from ortprep.runtime.pool.books import Books, abort_if_interrupted, clone_error
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
from ortprep.runtime.pool.process import PacketChannel
from ortprep.runtime.pool.slots import Slot, SlotTable
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature

P = ParamSpec("P")
T = TypeVar("T")

_MAX_KNOWN = 1024
_MAX_KEPT_BYTES = 2**20
_NO_REGION = Region(0)


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


class RequestTable(Books):
    """The slots of a pool, at most `max_pending`; further calls block.

    Attributes:
        copied_in_bytes, copied_out_bytes: Bytes of inputs and outputs that were copied.
    """

    def __init__(
        self, signatures: Mapping[str, Signature], memory: RegionTable, max_pending: int = 1024
    ) -> None:
        super().__init__()
        self.signatures, self.memory = signatures, memory
        self.slots = SlotTable()
        self._given_up: deque[Slot] = deque()
        self.copied_in_bytes = self.copied_out_bytes = 0
        self._max_pending = max_pending
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

    # With the lock held.

    @abort_if_interrupted
    def collect(self) -> bool:
        """Frees the slots that callers gave up, and arrays that are gone; returns whether there were any."""
        has_any = self.memory.collect()
        while self._given_up:
            slot = self._given_up.popleft()
            if not slot.is_filled:
                has_any = True
                self.slots.give_up(slot)
                self._free(slot)
        return has_any

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
        region, outputs, answer = slot.region, self.signatures[slot.model].outputs, {}
        places = self._readers[slot.model].read(packet, head, 0 if region is None else region.size)
        slot.answer, slot.service_s = {}, head.figure / 1e9
        if slot.is_abandoned:
            return slot  # nobody waits for it
        try:
            for (name, dtype), place in zip(outputs.items(), places, strict=True):
                base, offset, shape = place
                if base == IN_FILE:
                    raise PoolError("answer lies outside of its memory")
                if base == IN_SLOT and region is not None:
                    view = self.memory.file.view(region.begin + offset, dtype, shape)
                    slot.copied_bytes += view.nbytes
                    slot.answer_bytes = max(slot.answer_bytes, offset + view.nbytes - slot.layout.slot_bytes)
                else:
                    view = np.ndarray(shape, dtype, packet, offset)
                answer[name] = _copy(view)
        except MemoryError:
            slot.error = PoolError("no memory for the copy of an answer")
        slot.answer = answer
        return slot

    @_then_send
    def done(self, worker: int, slots: Sequence[Slot]) -> list[float]:
        """Takes what a worker answered; returns how long each took, in seconds, from its caller's call."""
        now = time.monotonic()
        for slot in slots:
            self.slots.answer(worker, slot.number, now, service_s=slot.service_s)
            self._adapt(slot, slot.answer_bytes)
            self.copied_out_bytes += slot.copied_bytes
            self._end(slot)
        return [now - slot.begun for slot in slots]

    @_then_send
    def grow(self, worker: int, number: int, size: int) -> None:
        """Gives a worker's slot as much memory for its answer as the worker says that it needs.

        That may be more than the pool is to use: it then accepts no request until some is free.

        Raises:
            PoolError: It has grown already, or is none whose turn it is.
        """
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

    def _remember(self, slot: Slot, size: int) -> None:
        """Remembers what the answer to inputs of some shapes takes, so that the next slot is large enough."""
        if len(self._answer_bytes) >= _MAX_KNOWN:
            self._answer_bytes.clear()
        self._answer_bytes[_kind_of(slot)] = size

    def _adapt(self, slot: Slot, size: int) -> None:
        """Remembers less where an answer took less than half of what was remembered."""
        if slot.region is not None and 2 * size < self._answer_bytes.get(_kind_of(slot), 0):
            self._answer_bytes[_kind_of(slot)] = size

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
        self.memory.scrub()
        self._end(*self.slots.lose(worker, fails_oldest=fails_oldest), error=error)

    def set_aside(self, worker: int) -> Region | None:
        """Returns the memory of the request that a worker is at, which goes on with a copy of its inputs.

        For a worker that is lost and may still write. Without memory for a copy, the request fails.
        """
        with self.lock:
            sent = self.slots.queue_of(worker).sent
            if not sent or sent[0].region is None:
                return None
            slot, region = sent[0], sent[0].region
            slot.region = None
            if self.memory.is_exhausted:
                self.slots.answer(worker, slot.number, time.monotonic())
                self._end(slot, error=NoRoomError("no shared memory to try a request again"))
                return region
            slot.region = self.memory.grow(None, region.size)
            self.memory.file.copy(region.begin, slot.region.begin, slot.layout.slot_bytes)
            slot.packet = self._encode(slot) + slot.packet[HEAD_BYTES:]
            return region

    def give_back(self, region: Region | None) -> None:
        """Takes memory back that was set aside."""
        if region is not None:
            with self.lock:
                self.memory.release(region)
                self.notify()

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
        """Fails the requests whose deadline has passed, and takes back memory that was let go."""
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


def _kind_of(slot: Slot) -> tuple[str, tuple[tuple[int, ...], ...]]:
    return slot.model, tuple([place.shape for place in slot.layout.places])


def _copy(view: Array) -> Array:
    """Returns a copy; a short one keeps the interpreter, since others would keep it for longer."""
    if view.nbytes > _MAX_KEPT_BYTES or not view.nbytes:
        return view.copy()
    return np.frombuffer(bytearray(view.data), view.dtype).reshape(view.shape)
