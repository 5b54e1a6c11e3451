"""The requests of a pool that are not answered yet, and what becomes of them; all under one lock.

When a request leaves the ledger, its outcome joins a queue before anything else is done that could fail.
`resolve_ended` then resolves the futures, without the lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ortprep.errors import PipelineError, PoolClosedError, PoolError, RequestTimeoutError
from ortprep.runtime.pool.admission import AdmissionControl
from ortprep.runtime.pool.answers import ReplyReader, WorkerReply
from ortprep.runtime.pool.channel import PacketChannel
from ortprep.runtime.pool.futures import clone_error
from ortprep.runtime.pool.ledger import Ledger, Request
from ortprep.runtime.pool.messages import Head, MessageKind, Span, encode
from ortprep.runtime.pool.pool_memory import PoolMemory
from ortprep.runtime.pool.wakeup import WakeupEvent
from ortprep.runtime.tensors.signatures import Signature

_OFFSETS_PER_PACKET = 4096
_MIN_RELEASED_BYTES = 2**20


@dataclass
class RequestTable:
    """The requests that are not answered yet, at most `max_pending`; further calls block.

    Attributes:
        copied_in_bytes, copied_out_bytes: Bytes of inputs and outputs that were copied, here and in workers.
        changed: The pool's lock, notified of every request that ends.
    """

    signatures: Mapping[str, Signature]
    memory: PoolMemory
    max_pending: int
    copied_in_bytes: int = 0
    copied_out_bytes: int = 0
    wakeup: WakeupEvent = field(default_factory=WakeupEvent)
    ledger: Ledger = field(default_factory=Ledger)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._channels: dict[int, PacketChannel] = {}
        self._ended: deque[Request] = deque()
        self._copying = 0  # requests that are being written, and answers that are being copied
        self._readers = {name: ReplyReader(signature) for name, signature in self.signatures.items()}
        self.admission = AdmissionControl(self.changed, self.max_pending, self._count_pending)

    # With the lock held.

    def _count_pending(self) -> int:
        return len(self.ledger) + self._copying

    def _assign(self, model: str | None = None) -> None:
        for request, worker in self.ledger.assign(time.monotonic(), model):
            # The request first, so that the worker does not wake up twice.
            self._channels[worker].put(request.packet)
            self._put_releases(worker, min_bytes=_MIN_RELEASED_BYTES)

    def _put_releases(self, worker: int, *, min_bytes: int = 0) -> None:
        released = self.memory.take_released(worker, min_bytes=min_bytes)
        for begin in range(0, len(released), _OFFSETS_PER_PACKET):
            part = released[begin : begin + _OFFSETS_PER_PACKET]
            self._channels[worker].put(encode(MessageKind.RELEASE, offsets=part))

    def _trim(self) -> None:
        for worker in self.memory.trim():
            if worker in self._channels:
                self._put_releases(worker)
                self._channels[worker].put(encode(MessageKind.TRIM))

    def _free(self, request: Request) -> None:
        self.memory.release(request.block)
        request.block, request.arrays = Span(), ()

    def _end(self, *requests: Request, error: PipelineError | None = None) -> None:
        for request in requests:
            if not request.is_abandoned:
                request.error = None if error is None else clone_error(error)
                self._ended.append(request)
        for request in requests:
            self._free(request)

    def _flush(self) -> None:
        """Sends what was put down for workers; called without the lock."""
        is_done = False
        try:
            flushed = [channel.flush() for channel in tuple(self._channels.values())]
            is_done = all(flushed)
        finally:
            if not is_done:
                self.wakeup.set()  # the thread then waits for room, or sees what was broken off

    # What the supervisor does.

    def add_worker(self, worker: int, models: tuple[str, ...]) -> None:
        """Makes a worker known; it has no requests until `open_worker`."""
        with self.changed:
            self.ledger.add_worker(worker, frozenset(models))

    def open_worker(self, worker: int, channel: PacketChannel) -> None:
        """Lets a worker have requests."""
        with self.changed:
            self._channels[worker] = channel
            self.ledger.open_worker(worker)
            self._assign()
            self.changed.notify_all()
        self._flush()

    def read(self, worker: int, head: Head, packet: memoryview, *, position: int) -> WorkerReply:
        """Reads what a worker answered, as far as it travelled in the packet, which is used again then.

        `position` counts the answers that were read before it and are not taken yet.

        Raises:
            PoolError: It is no answer to the request whose turn it is.
            ValueError: As `ReplyReader.read`.
        """
        request = self.ledger.expect(worker, head.number, position=position)
        return self._readers[request.model].read(head, packet)

    def done(self, worker: int, replies: Sequence[WorkerReply]) -> tuple[list[float], Exception | None]:
        """Takes the answers of a worker, up to the first that lies in memory that it does not have.

        Returns how long each request took, in seconds, from its caller's call; and what was wrong.
        """
        waited_s: list[float] = []
        wrong: Exception | None = None
        with self.changed:
            now = time.monotonic()
            try:
                for reply in replies:
                    waited_s.append(now - self._accept(worker, reply, now).begun)
            except (PoolError, ValueError) as error:
                wrong = error
            if self.memory.has_grown:
                self._trim()
            self._assign()
            self.changed.notify_all()
        self._flush()
        return waited_s, wrong

    def _accept(self, worker: int, reply: WorkerReply, now: float) -> Request:
        head, answer = reply.head, reply.answer
        if answer is None:
            block = Span(head.block, head.block_bytes)
            self.memory.claim(worker, block)
            answer = reply.view(self.memory.queue.refer(block))
        request = self.ledger.answer(worker, head.number, now, service_s=head.elapsed_ns / 1e9)
        request.answer, request.copy = answer, request.copy and reply.answer is None
        self._copying += request.copy and not request.is_abandoned
        self._end(request)
        self.copied_out_bytes += head.copied_bytes
        return request

    def failed(self, worker: int, number: int, error: PipelineError) -> None:
        """Takes a worker's word that a request failed; raises `PoolError` if it was none of its requests."""
        with self.changed:
            request = self.ledger.answer(worker, number, time.monotonic())
            self._end(request, error=error)
            self._assign()
            self.changed.notify_all()
        self._flush()

    def lose(self, worker: int, error: PipelineError, *, blamed: int | None) -> None:
        """Takes back what a worker had whose process has ended.

        Its oldest request fails with `error`, unless that may be tried again, if it is to be `blamed`.
        """
        with self.changed:
            self._channels.pop(worker, None)
            # It may have gone on after an answer to its oldest request that was refused.
            blames_oldest = blamed in self.ledger.queue_of(worker).sent
            self._end(*self.ledger.lose(worker, blames_oldest=blames_oldest), error=error)
            self.memory.end_worker(worker)
            self._assign()
            self.changed.notify_all()
        self._flush()

    def mark_unavailable(self, model: str, error: PipelineError) -> None:
        """Fails what waits for a model that no worker serves any more, and all later requests for it."""
        with self.changed:
            self.admission.mark_unavailable(model, error)
            self._end(*self.ledger.withdraw_all(model), error=error)
            self.changed.notify_all()

    def resolve_ended(self) -> None:
        """Tells callers what became of their requests; called without the lock."""
        while self._ended:
            request = self._ended.popleft()
            try:
                if request.copy and request.answer is not None:
                    self._copy(request)  # which takes long, and does not keep others from the lock
            finally:
                request.resolve()

    def _copy(self, request: Request) -> None:
        views, request.answer = request.answer or {}, None
        size_bytes = sum(array.nbytes for array in views.values())
        try:
            request.answer = {name: array.copy() for name, array in views.items()}
        except MemoryError:
            request.error = PoolError(f"no memory for the copy of an answer\n  expected {size_bytes} bytes")
        views.clear()
        with self.changed:
            self._copying -= 1
            self.copied_out_bytes += size_bytes
            self.memory.collect()
            self.changed.notify_all()

    def expire(self) -> None:
        """Fails the requests whose deadline has passed, and takes back memory that was let go."""
        with self.changed:
            is_changed = self.memory.collect()
            for request in self.ledger.expire(time.monotonic()):
                is_changed, where = True, f"worker {request.worker} has it"
                if request.worker is None:
                    where = "waiting for a worker"
                text = (
                    f"expected an answer within {request.deadline - request.begun:.3g} s, got none; {where}"
                )
                request.error = RequestTimeoutError(f"request to {request.model} took too long\n  {text}")
                self._ended.append(request)
                if request.worker is None:
                    self._free(request)
            if is_changed:
                self.changed.notify_all()

    def forget(self, error: PipelineError) -> threading.Condition:
        """Becomes closed and empty, in a fork of its process; returns its new lock.

        The old one may be held by a thread that was not forked.
        """
        self.changed = threading.Condition()
        self.ledger, self._copying = Ledger(), 0
        self._channels.clear()
        self.admission = AdmissionControl(self.changed, self.max_pending, self._count_pending)
        self.admission.closed_by = error
        self.memory.close(discards=False)
        return self.changed

    @property
    def closed_error(self) -> PipelineError:
        """What requests of a closed pool fail with; a new one each time."""
        return clone_error(self.admission.closed_by or PoolClosedError("pool was closed"))

    def abort(self) -> None:
        """Fails every request that is not answered; workers must be gone."""
        with self.changed:
            self._end(*self.ledger.clear(), error=self.closed_error)
            self._channels.clear()
            self.memory.close()
            self.changed.notify_all()

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until every request that somebody waits for is answered, and returns whether all are."""
        with self.changed:
            return self.changed.wait_for(lambda: not self._copying and self.ledger.is_idle(), timeout_s)
