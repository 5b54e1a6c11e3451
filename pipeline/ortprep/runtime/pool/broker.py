"""How requests come in: a caller acquires a slot, copies its inputs in and sends it to a worker."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar

from ortprep.errors import NoRoomError, PipelineError, PoolError, RequestTimeoutError
from ortprep.runtime.pool.memory import RegionTable, pack_inline
from ortprep.runtime.pool.messages import (
    HEAD_BYTES,
    INLINE_BYTES,
    lay_out,
)
from ortprep.runtime.pool.request_table import RequestTable
from ortprep.runtime.pool.slots import Answer, PoolFuture, Slot, Waiter
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature, check_inputs

P = ParamSpec("P")
T = TypeVar("T")

RELEASE_TIMEOUT_S = 1.0
"""Seconds to wait for arrays to be let go of, where nothing else can make room."""


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


def _whole_or_closed(
    method: Callable[Concatenate[RequestBroker, P], T],
) -> Callable[Concatenate[RequestBroker, P], T]:
    """Returns a method that closes the pool if it is broken off: the books could contradict each other.

    A signal's handler may raise anywhere in the main thread. That is rare here, a few microseconds for a
    request; then every request fails with this as its reason, and none is left unanswered.
    """

    @functools.wraps(method)
    def guarded(self: RequestBroker, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except (PipelineError, MemoryError):
            raise
        except BaseException as error:
            kind = type(error).__name__
            self.close(PoolError(f"request interrupted by a signal; pool closed\n  got {kind}"))
            self.wakeup.stop_soon()
            raise

    return guarded


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

    def run(self, model: str, inputs: Mapping[str, Any], options: RequestOptions) -> Answer:
        """Takes a request and waits for its answer; raises as `SessionPool.run`."""
        self.refuse_in_callback("run()")
        waiter = Waiter()
        self._send(next(self._numbers), waiter, model, inputs, options)
        return waiter.result()

    def empty(self, model: str, name: str, shape: tuple[int, ...], options: RequestOptions) -> Array:
        """Returns an array in shared memory, for a producer to fill.

        Raises:
            PoolError: There is no shared memory for it, or the pool is closed.
            RequestTimeoutError: There was none before the deadline.
        """
        dtype = self.signatures[model].inputs[name]
        size = max(1, math.prod(shape) * dtype.itemsize)
        self.memory.require_room(size)
        with self.lock:
            self._wait_for_room(model, size, options, is_request=False)
            return self.memory.lend(self.memory.take(size)).view(dtype, shape)

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
        future: PoolFuture | Waiter,
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
        try:
            with self.lock:
                if not self.memory.has_room(size):
                    size = layout.slot_bytes  # its answer then asks for memory of its own
                if not self._wait_for_room(model, size, options):
                    return False
                self._acquire(slot, size, body)
                if not layout.slot_bytes:
                    self._admit(slot, copied_bytes)
            if layout.slot_bytes and slot.region is not None:
                self.memory.file.write(slot.region.begin, layout, arrays)
                if time.monotonic() >= slot.deadline:
                    text = f"expected an answer within {slot.deadline - slot.begun:.3g} s, got none"
                    raise RequestTimeoutError(
                        f"request to {model} took too long\n  {text}; copying its inputs"
                    )
                with self.lock:
                    self._admit(slot, copied_bytes)
        except BaseException:  # a signal's handler may raise here, too
            if not slot.is_filled:
                with self.lock:
                    self._give_up(slot)
            raise
        self._flush()
        return True

    def _find(self, array: Array) -> int | None:
        """Returns where in shared memory an array lies; small ones are copied, which costs no more."""
        flags = array.flags
        if array.nbytes < INLINE_BYTES or not (flags.c_contiguous and flags.aligned and array.dtype.isnative):
            return None
        return self.memory.find(array)

    @_whole_or_closed
    def _acquire(self, slot: Slot, size: int, body: bytes) -> None:
        """Takes a slot with its memory, with the lock held."""
        self.slots.acquire(slot)
        slot.region = self.memory.take(size) if size else None
        slot.packet = self._encode(slot) + body

    @_whole_or_closed
    def _admit(self, slot: Slot, copied_bytes: int) -> None:
        """Hands a filled slot in, with the lock held."""
        self._require_open(slot.model)
        self.copied_in_bytes += copied_bytes
        is_next = slot.deadline < self.slots.next_deadline()
        self.slots.admit(slot)
        self._assign(slot.model)
        if is_next:
            self.wakeup.watch(slot.deadline)

    @_whole_or_closed
    def _give_up(self, slot: Slot) -> None:
        self.slots.give_up(slot)
        self._free(slot)
        self.changed.notify_all()

    def _withdraw(self, number: int) -> bool:
        with self.lock:
            return self._take_back(number)

    @_whole_or_closed
    def _take_back(self, number: int) -> bool:
        slot = self.slots.withdraw(number)
        if slot is None:
            return False
        self._free(slot)
        self.changed.notify_all()
        return True

    # Whether there is room.

    def _wait_for_room(
        self, model: str, size: int, options: RequestOptions, *, is_request: bool = True
    ) -> bool:
        """Waits until there is room for so many bytes, and for one more request if it is for one.

        Returns whether there is, which is always so for a caller that may wait.

        Raises:
            PoolError: The pool is closed or has no worker left, or this is the thread that would make room.
            NoRoomError: Arrays hold the memory, and no answer is to come.
            RequestTimeoutError: The deadline passed.
        """
        gives_up_at, has_waited = math.inf, False
        while True:
            self._require_open(model)
            is_full = is_request and len(self.slots) >= self._max_pending
            has_room = not is_full and self.memory.has_room(size)
            if not options.may_wait and (has_waited or not has_room):
                return False  # also where its caller gave up meanwhile
            if has_room:
                return True
            reason = f"{self._max_pending} requests before it" if is_full else "no shared memory free"
            self.refuse_in_callback(reason)
            now = time.monotonic()
            # Where no answer is to come, arrays hold the memory: they get a moment to be let go of.
            gives_up_at = math.inf if len(self.slots) else min(gives_up_at, now + RELEASE_TIMEOUT_S)
            if now >= options.deadline:
                raise RequestTimeoutError(
                    f"request did not get its turn within {options.timeout_s:g} s\n  got {reason}"
                )
            if now >= gives_up_at:
                raise NoRoomError(
                    f"shared memory is full\n  expected {size} bytes free of {self.memory.max_bytes}, "
                    "got the rest in use by arrays of empty()",
                    hint="release arrays of pool.empty(…)",
                )
            self.memory.awaited_by = self.wakeup.set
            if self.memory.collect():
                continue  # an array went just before
            self.changed.wait(min(options.deadline - now, gives_up_at - now, threading.TIMEOUT_MAX))
            has_waited = True
