"""Requests of a pool on their way to a deployment: small ones that wait travel together in one call.

A call of a Serve handle costs milliseconds, whatever it carries. So a pool has few calls at a time, two for
each replica, and what comes meanwhile shares the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import exceptions
from ray.serve.exceptions import BackPressureError, RayServeException

from ortprep.errors import PipelineError, PoolError, RequestTimeoutError, WorkerDiedError, from_dict
from ortprep.runtime.pool.admission import AdmissionControl, RequestOptions
from ortprep.runtime.pool.futures import Answer, PoolFuture, clone_error
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature, check_inputs

SMALL_BYTES = 64 * 1024
"""Most bytes of inputs that travel together; Ray puts what is above 100 KB into its object store."""

CALLS_PER_REPLICA = 2
"""One that a replica works on, and one that waits there, so that it never waits for the next."""

_MAX_CALL_NS = 5_000_000
_COPY_BYTES = 16 * 1024
_RETRY_DELAY_S, _FOLLOW_S = 0.05, 2.0

Send = Callable[[Sequence[tuple[str, str, Sequence[Array]]]], Awaitable[Sequence[Any]]]


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that is not answered yet; `alone` since a replica died of it, or of one beside it."""

    model: str
    arrays: Sequence[Array]
    size_bytes: int
    copies: bool
    retries: int
    future: PoolFuture
    alone: bool = False
    is_done: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass
class RequestCounts:
    """What became of requests.

    Attributes:
        served: Answered.
        failed: Failed, and told so.
        retried: Tries that followed the death of a replica.
        calls: Calls of the deployment.
    """

    served: int = 0
    failed: int = 0
    retried: int = 0
    calls: int = 0


class RequestCoalescer:
    """Takes requests from any thread, and sends up to `max_batch` in a call from one of its own."""

    def __init__(
        self, signatures: Mapping[str, Signature], send: Send, *, max_pending: int, max_batch: int
    ) -> None:
        self._signatures, self._send = signatures, send
        self._max_batch = max_batch
        self._digests = {model: signature.digest for model, signature in signatures.items()}
        self._changed = threading.Condition()
        self._waiting: deque[QueuedRequest] = deque()
        self._open: set[QueuedRequest] = set()
        self.admission = AdmissionControl(self._changed, max_pending, self._open.__len__)
        self._calls = 0
        self._is_woken = False
        self._run_ns: dict[str, float] = {}
        self.counts, self.replicas = RequestCounts(), 1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="ortprep-ray-pool", daemon=True)
        self.admission.answering = self._thread
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def follow(self, read_states: Callable[[], Mapping[str, int]]) -> None:
        """Reads how many replicas run, now and every few seconds: autoscaling and lost nodes change that."""
        self.replicas = max(1, read_states().get("RUNNING", 0))
        asyncio.run_coroutine_threadsafe(self._follow(read_states), self._loop)

    async def _follow(self, read_states: Callable[[], Mapping[str, int]]) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_S)
            # The next look may do better; ValueError where the program uses Serve meanwhile (`CONFIG_LOCK`).
            with contextlib.suppress(exceptions.RayError, RayServeException, ValueError):
                states = await asyncio.to_thread(read_states)
                self.replicas = max(1, states.get("RUNNING", 0))

    @property
    def pending(self) -> int:
        """How many requests are not answered yet."""
        return len(self._open)

    def run(self, model: str, inputs: Mapping[str, Any], options: RequestOptions) -> Answer:
        """Takes a request and waits for its answer."""
        future = self.submit(model, inputs, options)
        try:
            return future.result()
        finally:
            future.cancel()

    def empty(self, model: str, name: str, shape: tuple[int, ...], options: RequestOptions) -> Array:
        """Returns an array for an input."""
        del options
        return np.empty(shape, self._signatures[model].inputs[name])

    def submit(self, model: str, inputs: Mapping[str, Any], options: RequestOptions) -> PoolFuture:
        """Takes a request, once there is room for it, and returns its future.

        Raises:
            WouldBlock: There is no room, and it may not wait.
            PoolError: The pool is closed, the inputs are wrong, or the deadline passed.
        """
        types = self._signatures[model].inputs.values()
        checked = check_inputs(self._signatures[model], inputs)
        arrays = [np.array(array, dtype, order="C") for array, dtype in zip(checked, types, strict=True)]
        future = PoolFuture(lambda: self._withdraw(request))
        size = sum(array.nbytes for array in arrays)
        request = QueuedRequest(model, arrays, size, options.copy, options.retries, future)
        with self._changed:
            self.admission.wait_turn(model, options)
            self._open.add(request)
            self._waiting.append(request)
            must_wake, self._is_woken = not self._is_woken, True
        if options.deadline < math.inf:
            self._loop.call_soon_threadsafe(self._watch, request, options.deadline, options.timeout_s)
        if must_wake:
            self._loop.call_soon_threadsafe(self._pump)
        return future

    def _withdraw(self, request: QueuedRequest) -> bool:
        with self._changed:
            if request.is_done or request not in self._waiting:
                return False
            self._waiting.remove(request)
            self._end(request)
            return True

    def _end(self, request: QueuedRequest) -> None:
        request.is_done = True
        self._open.discard(request)
        self._changed.notify_all()
        if request.timer is not None:
            self._loop.call_soon_threadsafe(request.timer.cancel)

    def _watch(self, request: QueuedRequest, deadline: float, timeout_s: float | None) -> None:
        if not request.is_done:
            delay_s = max(0.0, deadline - time.monotonic())
            request.timer = self._loop.call_later(delay_s, self._expire, request, timeout_s)

    def _expire(self, request: QueuedRequest, timeout_s: float | None) -> None:
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
        text = f"request to {request.model} took too long\n  expected an answer within {timeout_s or 0:.3g} s"
        self._fail(request, RequestTimeoutError(text))

    def _pump(self) -> None:
        while True:
            with self._changed:
                self._is_woken = False
                has_room = self._calls < CALLS_PER_REPLICA * max(1, self.replicas)
                batch = self._take() if has_room else []
                if not batch:
                    return
                self._calls += 1
            self.counts.calls += 1
            self._loop.create_task(self._call(batch))

    def _take(self) -> list[QueuedRequest]:
        """Takes the requests of the next call, in order; long runs, and those not timed yet, go alone."""
        batch: list[QueuedRequest] = []
        size, time_ns = 0, 0.0
        while self._waiting and len(batch) < self._max_batch:
            request = self._waiting[0]
            size += request.size_bytes
            time_ns += self._run_ns.get(request.model, math.inf)
            if batch and (size > SMALL_BYTES or time_ns > _MAX_CALL_NS or request.alone or batch[0].alone):
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _call(self, batch: Sequence[QueuedRequest]) -> None:
        try:
            results = await self._send(
                [(request.model, self._digests[request.model], request.arrays) for request in batch]
            )
            for request, (outputs, failure, elapsed_ns) in zip(batch, results, strict=True):
                self._answer(request, outputs, failure, elapsed_ns)
        except BackPressureError:
            await asyncio.sleep(_RETRY_DELAY_S)
            self._put_back(batch)
        except (exceptions.RayTaskError, RayServeException) as error:
            for request in batch:
                self._fail(request, PoolError(f"deployment failed\n  {_last_line(error)}"))
        except (exceptions.RayError, asyncio.CancelledError) as error:
            self._retry(batch, error)
        except Exception as error:  # noqa: BLE001 - whatever Serve raises, no caller may wait for ever
            for request in batch:
                self._fail(request, PoolError(f"call failed\n  {type(error).__name__}: {error}"))
        with self._changed:
            self._calls -= 1
        self._pump()

    def _answer(
        self,
        request: QueuedRequest,
        outputs: Sequence[Array] | None,
        failure: Mapping[str, Any] | None,
        elapsed_ns: int,
    ) -> None:
        average_ns = self._run_ns.get(request.model, elapsed_ns)
        self._run_ns[request.model] = average_ns + (elapsed_ns - average_ns) / 8
        if outputs is None:
            self._fail(request, from_dict(failure or {}))
            return
        names = self._signatures[request.model].outputs
        answer = {
            name: np.array(array) if request.copies or array.nbytes <= _COPY_BYTES else array
            for name, array in zip(names, outputs, strict=True)
        }
        with self._changed:
            if request.is_done:
                return
            self._end(request)
        self.counts.served += 1
        request.future.set_result(answer)

    def _fail(self, request: QueuedRequest, error: PipelineError) -> None:
        with self._changed:
            if request.is_done:
                return
            self._end(request)
        self.counts.failed += 1
        request.future.set_exception(error)

    def _put_back(self, batch: Sequence[QueuedRequest]) -> None:
        with self._changed:
            self._waiting.extendleft(request for request in reversed(batch) if not request.is_done)

    def _retry(self, batch: Sequence[QueuedRequest], error: BaseException) -> None:
        again = [request for request in batch if request.retries > 0 and self.admission.closed_by is None]
        for request in again:
            request.retries -= 1
            request.alone = True
        self.counts.retried += len(again)
        self._put_back(again)
        for request in batch:
            if request not in again:
                text = f"a replica died during a request to {request.model}\n  {_last_line(error)}"
                self._fail(request, WorkerDiedError(text, hint="run(…, retries=2) tries it on another"))

    def close(self, error: PipelineError, *, drain: bool, timeout_s: float | None = None) -> None:
        """Takes no more requests; those that were taken are answered first, or fail."""
        self.admission.close(error)
        with self._changed:
            if drain:
                self._changed.wait_for(lambda: not self._open, timeout_s)
            unanswered = list(self._open)
            self._waiting.clear()
        for request in unanswered:
            self._fail(request, clone_error(error))
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else 'no message'}"
