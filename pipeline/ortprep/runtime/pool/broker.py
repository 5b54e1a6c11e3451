"""How requests come in: a caller acquires a slot, copies its inputs in and sends it to a worker."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ortprep.errors import PoolError, RequestTimeoutError
from ortprep.runtime.ipc import copy_arrays
from ortprep.runtime.pool.memory import RegionTable
from ortprep.runtime.pool.messages import encode_body, lay_out
from ortprep.runtime.pool.request_table import RequestTable, abort_if_interrupted
from ortprep.runtime.pool.slots import PoolFuture, Slot
from ortprep.runtime.tensors.signatures import Signature, check_inputs


@dataclass(slots=True)
class RequestOptions:
    """How a request is served, see `SessionPool.run`; `deadline` counts from its caller's call."""

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
        self._itemsizes = {
            name: tuple([dtype.itemsize for dtype in one.inputs.values()]) for name, one in signatures.items()
        }

    def submit(self, model: str, inputs: Mapping[str, Any], options: RequestOptions) -> PoolFuture | None:
        """Takes a request, and returns its future; None if it would have to wait for room, and may not.

        Raises:
            InvalidRequestError: The inputs are not the model's.
            PoolError: The pool is closed, has no worker left for the model, or no shared memory.
            RequestTimeoutError: The deadline passed before there was room for the request.
        """
        arrays = check_inputs(self.signatures[model], inputs)
        layout = lay_out(tuple([array.shape for array in arrays]), self._itemsizes[model])
        self.memory.require_room(layout.slot_bytes)
        number = next(self._numbers)
        future = PoolFuture(lambda: self._withdraw(number))
        slot = Slot(number, model, options.deadline, options.retries, future, options.begun, layout)
        slot.body = encode_body(layout, arrays)
        try:
            if not self._claim(slot, options):
                return None
            if slot.region is not None and layout.slot_bytes:
                copy_arrays(arrays, layout.offsets, self.memory.file.memory, slot.region.begin)
                if time.monotonic() >= slot.deadline:
                    text = f"expected an answer within {options.timeout_s:.3g} s, got none"
                    raise RequestTimeoutError(
                        f"request to {model} took too long\n  {text}; copying its inputs"
                    )
                with self.lock:
                    self._admit(slot)
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
        return future

    def refuse_in_callback(self, reason: str) -> None:
        """Raises `PoolError` if this is the thread that answers, which would wait for itself."""
        if threading.current_thread() is self.answering:
            raise PoolError(
                f"a future's callback would have to wait for its own pool\n  got {reason}",
                hint="call it from another thread",
            )

    def _claim(self, slot: Slot, options: RequestOptions) -> bool:
        """Waits until there is a permit and room for a slot, takes them, and admits a slot without memory.

        Returns whether it did; False for a caller that would have to wait and may not.

        Raises:
            PoolError: The pool is closed or has no worker left, or this is the thread that would make room.
            RequestTimeoutError: The deadline passed.
        """
        change = None
        while True:
            with self.lock:
                self.close_if_interrupted()
                self._require_open(slot.model)
                lack = self._lack(slot.layout.slot_bytes)
                if not options.may_wait and (change is not None or lack is not None):
                    return False  # also where its caller gave up meanwhile
                if lack is None:
                    self._acquire(slot)
                    if not slot.layout.slot_bytes:
                        self._admit(slot)
                    return True
                self.refuse_in_callback(lack)
                now = time.monotonic()
                if now >= options.deadline:
                    raise RequestTimeoutError(
                        f"request did not get its turn within {options.timeout_s:g} s\n  got {lack}"
                    )
                change = self.next_change(change)
            change.acquire(timeout=min(threading.TIMEOUT_MAX, options.deadline - now))

    def _lack(self, size: int) -> str | None:
        """Returns what there is no room for, after taking back what was given up; the lock is held."""
        while True:
            is_full = len(self.slots) >= self._max_pending
            if not is_full and (not size or self.memory.has_room(size)):
                return None
            if not self.collect():
                return f"{self._max_pending} requests before it" if is_full else "no shared memory free"

    @abort_if_interrupted
    def _acquire(self, slot: Slot) -> None:
        """Takes a slot with its memory; the lock is held."""
        self.slots.acquire(slot)
        size = slot.layout.slot_bytes
        slot.region = self.memory.take(size) if size else None

    @abort_if_interrupted
    def _admit(self, slot: Slot) -> None:
        """Queues a filled slot, and gives it to a worker that has room; the lock is held."""
        self._require_open(slot.model)
        self.slots.admit(slot)
        self._assign(slot.model)
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
        """Withdraws a request that no worker has yet; returns whether it was one."""
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
