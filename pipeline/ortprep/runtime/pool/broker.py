"""How requests come in: a caller acquires a slot, copies its inputs in and sends it to a worker."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar

from ortprep.errors import NoRoomError, RequestTimeoutError
from ortprep.runtime.pool.books import abort_if_interrupted
from ortprep.runtime.pool.memory import ArrayMemory, RegionTable, pack_inline
from ortprep.runtime.pool.messages import (
    HEAD_BYTES,
    INLINE_BYTES,
    lay_out,
)
from ortprep.runtime.pool.request_table import RequestTable
from ortprep.runtime.pool.slots import PoolFuture, Slot
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature, check_inputs

T = TypeVar("T")

RELEASE_TIMEOUT_S = 1.0
"""Seconds to wait for arrays to be let go of, where nothing else can make room."""

_POLL_INTERVAL_S = 0.01
"""Seconds between looks for arrays that are gone, of a caller that waits for memory: what a garbage collector
does to tell somebody may be broken off by a signal, too."""


class CallOptions(TypedDict, total=False):
    """How a request is served.

    Attributes:
        timeout_s: Seconds after which to give up; without it, the call waits as long as it takes.
        retries: How often the request may be tried on another worker after one died of it.
    """

    timeout_s: float | None
    retries: int


@dataclass(slots=True)
class RequestOptions:
    """How a request is to be served; `timeout_s` and `deadline` count from its caller's call."""

    timeout_s: float | None = None
    retries: int = 0
    may_wait: bool = True
    begun: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """When its caller stops waiting; infinite for never."""
        return math.inf if self.timeout_s is None else self.begun + self.timeout_s


class RequestBroker(RequestTable):
    """The requests of a pool, and how they come in."""

    def __init__(
        self, signatures: Mapping[str, Signature], memory: RegionTable, max_pending: int = 1024
    ) -> None:
        super().__init__(signatures, memory, max_pending)
        self._numbers = itertools.count(1)

    def submit(self, model: str, inputs: Mapping[str, Any], options: RequestOptions) -> PoolFuture | None:
        """Takes a request, and returns its future; None if it would have to wait for room, and may not.

        Raises:
            InvalidRequestError: The inputs are not the model's.
            PoolError: The pool is closed, has no worker left for the model, or no shared memory.
            RequestTimeoutError: The deadline passed before there was room for the request.
        """
        number = next(self._numbers)
        future = PoolFuture(lambda: self._withdraw(number))
        return future if self._send(number, future, model, inputs, options) else None

    def empty(self, model: str, name: str, shape: tuple[int, ...], options: RequestOptions) -> Array:
        """Returns an array in shared memory, for a producer to fill.

        Raises:
            PoolError: There is no shared memory for it, or the pool is closed.
            RequestTimeoutError: There was none before the deadline.
        """
        dtype = self.signatures[model].inputs[name]
        size = max(1, math.prod(shape) * dtype.itemsize)
        self.memory.require_room(size)
        options.may_wait = True
        memory = self._claim(model, size, options, lambda: self._lend(size), is_request=False)
        assert memory is not None
        return memory.view(dtype, shape)

    @abort_if_interrupted
    def _lend(self, size: int) -> ArrayMemory:
        return self.memory.lend(self.memory.take(size))

    def share(self, model: str, name: str, array: Array, options: RequestOptions) -> Array:
        """Returns an input as it lies in shared memory, copied there unless it does; raises as `empty`."""
        if self.memory.find(array) is not None:
            return array
        shared = self.empty(model, name, array.shape, options)
        shared[...] = array
        with self.lock:
            self.copied_in_bytes += array.nbytes
        return shared

    def _send(
        self,
        number: int,
        future: PoolFuture,
        model: str,
        inputs: Mapping[str, Any],
        options: RequestOptions,
    ) -> bool:
        """Takes a request, and sends it if a worker has room; returns whether it did, as `submit`."""
        arrays = check_inputs(self.signatures[model], inputs)
        offsets = tuple([self._find(array) for array in arrays])
        shapes, sizes = tuple([array.shape for array in arrays]), tuple([array.nbytes for array in arrays])
        layout = lay_out(shapes, sizes, None if offsets.count(None) == len(offsets) else offsets)
        copied_bytes = sum([sizes[position] for position in layout.copied])
        slot = Slot(number, model, options.deadline, options.retries, future, options.begun, layout)
        if len(layout.copied) < len(arrays):
            slot.arrays = arrays
        # Its memory: inputs that are copied, then what the answer to such inputs took before.
        self.memory.require_room(layout.slot_bytes)
        answer_bytes = self._answer_bytes.get((model, shapes), 0)
        size = min(layout.slot_bytes + answer_bytes, self.memory.largest)
        body = layout.text
        if not layout.slot_bytes:
            body = pack_inline(bytes(HEAD_BYTES) + body, layout, arrays)[HEAD_BYTES:]

        def take() -> Slot:
            self._acquire(slot, size, body)
            if not layout.slot_bytes:
                self._admit(slot, copied_bytes)
            return slot

        try:
            if self._claim(model, layout.slot_bytes, options, take) is None:
                return False
            if slot.region is not None and layout.slot_bytes:
                self.memory.file.write(slot.region.begin, layout, arrays)
                if time.monotonic() >= slot.deadline:
                    text = f"expected an answer within {slot.deadline - slot.begun:.3g} s, got none"
                    raise RequestTimeoutError(
                        f"request to {model} took too long\n  {text}; copying its inputs"
                    )
                with self.lock:
                    self._admit(slot, copied_bytes)
            self._flush()
        except BaseException:
            # Two steps that a signal's handler, which may raise again, cannot come before: the supervisor
            # frees the slot unless it was admitted, and sends what was put down for workers.
            try:
                self._given_up.append(slot)
            finally:
                os.eventfd_write(self.wakeup.descriptor, 1)
            with self.lock:
                if self.collect():
                    self.notify()
            raise
        return True

    def _find(self, array: Array) -> int | None:
        """Returns where in shared memory an array lies; small ones are copied, which costs no more."""
        flags = array.flags
        if array.nbytes < INLINE_BYTES or not (flags.c_contiguous and flags.aligned and array.dtype.isnative):
            return None
        return self.memory.find(array)

    @abort_if_interrupted
    def _acquire(self, slot: Slot, size: int, body: bytes) -> None:
        """Takes a slot with its memory; the lock is held."""
        if not self.memory.has_room(size):
            size = slot.layout.slot_bytes  # its answer then asks for memory of its own
        self.slots.acquire(slot)
        slot.region = self.memory.take(size) if size else None
        slot.packet = self._encode(slot) + body

    @abort_if_interrupted
    def _admit(self, slot: Slot, copied_bytes: int) -> None:
        """Queues a filled slot, and gives it to a worker that has room; the lock is held."""
        self._require_open(slot.model)
        self.copied_in_bytes += copied_bytes
        is_next = slot.deadline < self.slots.next_deadline()
        self.slots.admit(slot)
        self._assign(slot.model)
        if is_next:
            self.wakeup.watch(slot.deadline)

    def _withdraw(self, number: int) -> bool:
        """Takes a waiting request back to be cancelled, also by the supervisor should a signal come next."""
        try:
            with self.lock:
                return self._take_back(number)
        finally:
            os.eventfd_write(self.wakeup.descriptor, 1)

    @abort_if_interrupted
    def _take_back(self, number: int) -> bool:
        slot = self.slots.find_waiting(number)
        if slot is None:
            return False
        # Resolved even if a signal breaks this off: until it is in that list, it stays in the table.
        slot.is_cancelled = True
        self._ended.append(slot)
        self.slots.withdraw(number)
        self._free(slot)
        self.notify()
        return True

    def _claim(
        self,
        model: str,
        size: int,
        options: RequestOptions,
        take: Callable[[], T],
        *,
        is_request: bool = True,
    ) -> T | None:
        """Waits until there is room for so many bytes, and for one more request if it is for one; takes it.

        Returns what `take` returns, which is called with the lock held; None for a caller that would have to
        wait and may not.

        Raises:
            PoolError: The pool is closed or has no worker left, or this is the thread that would make room.
            NoRoomError: Arrays hold the memory, and no answer is to come.
            RequestTimeoutError: The deadline passed.
        """
        gives_up_at, change = math.inf, None
        while True:
            with self.lock:
                self.close_if_interrupted()
                self._require_open(model)
                lack = self._lack(size, is_request=is_request)
                if not options.may_wait and (change is not None or lack is not None):
                    return None  # also where its caller gave up meanwhile
                if lack is None:
                    return take()
                self.refuse_in_callback(lack)
                now = time.monotonic()
                # Where no answer is to come, arrays hold the memory: they get a moment to be let go of.
                gives_up_at = math.inf if len(self.slots) else min(gives_up_at, now + RELEASE_TIMEOUT_S)
                if now >= options.deadline:
                    raise RequestTimeoutError(
                        f"request did not get its turn within {options.timeout_s:g} s\n  got {lack}"
                    )
                if now >= gives_up_at:
                    raise NoRoomError(
                        f"shared memory is full\n  expected {size} bytes free of {self.memory.max_bytes}, "
                        "got the rest in use by arrays of empty()",
                        hint="release arrays of pool.empty(…)",
                    )
                change = self.next_change(change)
                wait_s = _POLL_INTERVAL_S if self.memory.has_lent else threading.TIMEOUT_MAX
            change.acquire(timeout=min(wait_s, options.deadline - now, gives_up_at - now))

    def _lack(self, size: int, *, is_request: bool) -> str | None:
        """Returns what there is no room for, after taking back what was let go of; the lock is held."""
        for _ in range(2):
            is_full = is_request and len(self.slots) >= self._max_pending
            if not is_full and self.memory.has_room(size):
                return None
            if not self.collect():
                break
        return f"{self._max_pending} requests before it" if is_full else "no shared memory free"
