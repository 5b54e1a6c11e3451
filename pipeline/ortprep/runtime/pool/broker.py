"""How callers submit requests: checked, written to a packet or to shared memory, and sent to a worker.

Callers send their own requests, and the supervisor's thread takes the answers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from ortprep.errors import NoRoomError, PipelineError, PoolError
from ortprep.runtime.pool.admission import (
    RequestOptions,
    WouldBlock,
)
from ortprep.runtime.pool.futures import Answer, PoolFuture, Waiter
from ortprep.runtime.pool.ledger import Request
from ortprep.runtime.pool.memory import pack_inline
from ortprep.runtime.pool.messages import INLINE_BYTES, Layout, MessageKind, Span, encode_tensors, lay_out
from ortprep.runtime.pool.request_table import RequestTable
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import check_inputs

RELEASE_TIMEOUT_S = 1.0
"""Seconds to wait for arrays to be let go of, where nothing else can make room."""


class RequestBroker(RequestTable):
    """The requests of a pool, and how they come in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._numbers = itertools.count(1)
        self._models = {name: number for number, name in enumerate(self.signatures)}

    def submit(self, model: str, inputs: Mapping[str, Any], options: RequestOptions) -> PoolFuture:
        """Takes a request, sends it if a worker has room, and returns its future; raises as `_send`."""
        number = next(self._numbers)
        future = PoolFuture(lambda: self._withdraw(number))
        self._send(number, future, model, inputs, options)
        return future

    def run(self, model: str, inputs: Mapping[str, Any], options: RequestOptions) -> Answer:
        """Takes a request and waits for its answer; raises as `SessionPool.run`."""
        self.admission.refuse_in_callback("run()")
        waiter = Waiter()
        self._send(next(self._numbers), waiter, model, inputs, options)
        return waiter.result()

    def _send(
        self,
        number: int,
        future: PoolFuture | Waiter,
        model: str,
        inputs: Mapping[str, Any],
        options: RequestOptions,
    ) -> None:
        """Takes a request, and sends it to a worker if one has room.

        Raises:
            InvalidRequestError: The inputs are not the model's.
            PoolError: The pool is closed, has no worker left for the model, or no shared memory.
            RequestTimeoutError: The deadline passed before there was room for the request.
            WouldBlock: It would have to wait, and may not.
        """
        arrays = check_inputs(self.signatures[model], inputs)
        offsets = tuple([self._find(array) for array in arrays])
        shapes, sizes = tuple([array.shape for array in arrays]), tuple([array.nbytes for array in arrays])
        layout = lay_out(shapes, sizes, None if offsets.count(None) == len(offsets) else offsets)
        packet = b""
        if not layout.block_bytes:
            packet = pack_inline(self._encode(number, model, layout, Span()), layout, arrays)
        pending = Request(
            number,
            model,
            options.deadline,
            options.retries,
            future=future,
            packet=packet,
            arrays=arrays,
            copy=options.copy,
            begun=options.begun,
        )
        copied_bytes = sum(sizes[position] for position in layout.copied)
        with self.changed:
            has_turn = partial(self.admission.wait_turn, model, options)
            pending.block = self._allocate(layout.block_bytes, options, has_turn)
            if not layout.block_bytes:
                with self._abort_if_interrupted():
                    self._admit(pending, copied_bytes)
            else:
                self._copying += 1
        if layout.block_bytes:
            self._write_block(pending, layout)
            with self.changed, self._abort_if_interrupted():
                self._copying -= 1
                self._admit(pending, copied_bytes)
        self._flush()

    def _find(self, array: Array) -> int | None:
        """Returns where in shared memory an array lies; small ones are copied, which costs no more."""
        flags = array.flags
        if array.nbytes < INLINE_BYTES or not (flags.c_contiguous and flags.aligned and array.dtype.isnative):
            return None
        return self.memory.find(array)

    def _encode(self, number: int, model: str, layout: Layout, block: Span) -> bytes:
        return encode_tensors(MessageKind.RUN, self._models[model], number, layout, block)

    def _write_block(self, pending: Request, layout: Layout) -> None:
        try:
            self.memory.file.write(pending.block, layout, pending.arrays)
            pending.packet = self._encode(pending.number, pending.model, layout, pending.block)
        except BaseException:  # a signal's handler may raise here, too
            with self.changed:
                self._copying -= 1
                self._free(pending)
                self.changed.notify_all()
            raise

    @contextmanager
    def _abort_if_interrupted(self) -> Iterator[None]:
        """Closes the pool if what is inside is broken off: the books could contradict each other.

        A signal's handler may raise anywhere in the main thread. That is rare here, a few microseconds for a
        request; then every request fails with this as its reason, and none is left unanswered.
        """
        try:
            yield
        except (PipelineError, WouldBlock, MemoryError):
            raise
        except BaseException as error:  # whatever a signal's handler raised
            kind = type(error).__name__
            self.admission.close(PoolError(f"request interrupted by a signal; pool closed\n  got {kind}"))
            self.wakeup.stop_soon()
            raise

    def _admit(self, pending: Request, copied_bytes: int) -> None:
        try:
            self.admission.require_open(pending.model)
        except PipelineError:
            self._free(pending)
            self.changed.notify_all()
            raise
        self.copied_in_bytes += copied_bytes
        is_next = pending.deadline < self.ledger.next_deadline()
        self.ledger.admit(pending)
        self._assign(pending.model)
        if is_next:
            self.wakeup.watch(pending.deadline)

    def empty(self, model: str, name: str, shape: tuple[int, ...], options: RequestOptions) -> Array:
        """Returns an array in shared memory, for a producer to fill.

        Raises:
            PoolError: There is no shared memory for it, or the pool is closed.
            RequestTimeoutError: There was none before the deadline.
        """
        dtype = self.signatures[model].inputs[name]
        size = math.prod(shape) * dtype.itemsize
        with self.changed:
            is_open = partial(self.admission.require_open, model)
            block = self.memory.queue.refer(self._allocate(max(size, 1), options, is_open))
        return block.view(0, dtype, shape)

    def _allocate(self, size: int, options: RequestOptions, admit: Callable[[], None]) -> Span:
        """Returns memory as soon as there is some; `admit` waits, or raises, before each look."""
        admit()
        while (span := self.memory.allocate(size)) is None:
            self._wait_for_memory(size, options)
            admit()
        if size:
            self._trim()
        return span

    def _wait_for_memory(self, size: int, options: RequestOptions) -> None:
        """Waits until there may be more; where no answer is to come, a moment for arrays that are let go."""
        self.memory.queue.awaited_by = self.wakeup.set
        if self.memory.collect():
            return  # some was left just before
        if len(self.ledger) or self._copying:
            options.gives_up_at = math.inf
            self.admission.wait(options, "no shared memory free")
            return
        now = time.monotonic()
        if options.gives_up_at == math.inf:
            options.gives_up_at = now + RELEASE_TIMEOUT_S
        if now >= options.gives_up_at or not options.may_wait:
            raise NoRoomError(
                f"shared memory is full\n"
                f"  expected {size} bytes free of {self.memory.max_bytes}, got the rest in use by arrays",
                hint="release answers, or ask for copies: run(…, copy=True)",
            )
        self.admission.refuse_in_callback("no shared memory free")
        self.changed.wait(max(0.0, min(options.gives_up_at, options.deadline) - now))
        if time.monotonic() >= options.deadline:
            self.admission.wait(options, "no shared memory free")

    def _withdraw(self, number: int) -> bool:
        with self.changed:
            request = self.ledger.withdraw(number)
            if request is None:
                return False
            self._free(request)
            self.changed.notify_all()
        return True
