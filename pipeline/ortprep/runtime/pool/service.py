"""What becomes of a request: a lane, an answer, another try after a worker died of it, or an error."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence, Set
from queue import Empty, SimpleQueue

from ortprep.errors import PipelineError
from ortprep.runtime.pool.dispatch import Dispatcher, PoolFuture, Request
from ortprep.runtime.pool.lane import Answer, Lane, LateError, LostError
from ortprep.runtime.pool.memory import LANES
from ortprep.runtime.tensors.signatures import Signature

log = logging.getLogger(__name__)

_THREADS = "ortprep-pool"
_MIN_DUE = 1024


class Service:
    """Serves requests: on the thread that calls `answer`; those of `submit` on threads of its own.

    A signal's handler may raise in the main thread between any two steps, so the main thread never changes
    what this and the dispatcher hold: it submits its requests, which puts them into a queue in one step.
    Models that the same workers have share a queue. It has as many threads as these workers have lanes, so
    that no model waits for another's workers.

    Args:
        signatures: Types of the models by name, in the order of their numbers.
        workers: The models of each worker.
    """

    def __init__(self, signatures: Mapping[str, Signature], workers: Sequence[Set[str]]) -> None:
        self.dispatcher = Dispatcher()
        self._signatures = signatures
        self._numbers = {name: number for number, name in enumerate(signatures)}
        self._deadlines: SimpleQueue[tuple[float, weakref.ref[Request]] | None] = SimpleQueue()
        self._is_stopped = False
        able = {model: tuple([model in models for models in workers]) for model in signatures}
        queues = {which: SimpleQueue[Request | None]() for which in able.values()}
        self._queues = {model: queues[which] for model, which in able.items()}
        self._aside, self._last_aside = SimpleQueue[Request | None](), PoolFuture()
        self._last_aside.cancel()
        self._served = [queue for which, queue in queues.items() for _ in range(LANES * sum(which))]
        self._served.append(self._aside)
        self._threads = {threading.Thread(target=self._expire, name=f"{_THREADS}-late", daemon=True)}
        for number, queue in enumerate(self._served):
            name = f"{_THREADS}-{number}"
            self._threads.add(threading.Thread(target=self._serve, args=(queue,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def is_on_own_thread(self) -> bool:
        """Whether the caller is the callback of a future, which must not wait for the others."""
        return threading.current_thread() in self._threads

    def submit(self, request: Request) -> None:
        """Takes a request, whose future is resolved whatever happens."""
        self._put(request, self._queues[request.model])

    def submit_aside(self, request: Request) -> None:
        """Does what `submit` does, for a caller that waits for each of its requests before the next.

        They have one thread, since the one that waited last wakes sooner than the one that waits for longest.
        """
        is_free = self._last_aside.done()  # else its thread has a request whose caller was interrupted
        self._put(request, self._aside if is_free else self._queues[request.model])
        self._last_aside = request.future if is_free else self._last_aside

    def _put(self, request: Request, queue: SimpleQueue[Request | None]) -> None:
        queue.put(request)
        if request.deadline < math.inf:
            self._deadlines.put((request.deadline, weakref.ref(request)))
        if self._is_stopped:  # its thread may have ended before
            request.future.fail(self.dispatcher.closed_error())

    def stop(self) -> None:
        """Ends the threads, once they have served what was submitted."""
        self._is_stopped = True
        self._deadlines.put(None)
        for queue in self._served:
            queue.put(None)

    @property
    def pending(self) -> int:
        """Number of requests that wait or are served."""
        return self.dispatcher.pending + sum(queue.qsize() for queue in set(self._served))

    def answer(self, request: Request, lane: Lane | None = None) -> Answer:
        """Returns the outputs for a request, on this thread.

        Args:
            request: The request.
            lane: The lane that it got; None to wait for one.

        Raises:
            PipelineError: As `SessionPool.run`.
        """
        is_first = False
        while True:
            lane = lane or self.dispatcher.acquire(request, is_first=is_first)
            try:
                return self._ask(request, lane)
            except LostError:
                self.dispatcher.retire(lane.process)
                try:
                    error, is_to_blame = lane.find_loss(request.deadline - time.monotonic())
                except LateError:
                    raise request.late(f"{lane.worker.name} had it") from None
                finally:
                    self.dispatcher.release(lane)
                if is_to_blame:
                    if request.retries <= 0:
                        raise self.dispatcher.closed_error(error) from None
                    request.retries -= 1
            lane = request.lane = None  # it was released
            is_first = True

    def _ask(self, request: Request, lane: Lane) -> Answer:
        """Asks a lane's worker, and releases the lane unless the worker is lost; raises as `Lane.ask`."""
        model, is_lost = request.model, False
        try:
            answer = lane.ask(self._numbers[model], self._signatures[model], request.arrays, request.deadline)
        except LostError:
            is_lost = True
            raise
        except LateError:
            raise request.late(f"{lane.worker.name} has it") from None
        except PipelineError:
            lane.worker.note_answer()
            raise
        else:
            lane.worker.note_answer(time.monotonic() - request.begun)
            return answer
        finally:
            if not is_lost:
                self._release(lane)

    def _release(self, lane: Lane) -> None:
        """Releases a lane, as soon as the worker has answered if nobody waits for that any more."""
        if lane.is_answered:
            self.dispatcher.release(lane)
            return
        try:
            threading.Thread(
                target=self._finish, args=(lane,), name=f"{_THREADS}-finish", daemon=True
            ).start()
        except RuntimeError:  # no thread to be had: the caller is told late, but the lane is not lost
            self._finish(lane)

    def _finish(self, lane: Lane) -> None:
        lane.finish()
        self.dispatcher.release(lane)

    # The threads.

    def _serve(self, queue: SimpleQueue[Request | None]) -> None:
        """Serves the requests of a queue, until it brings None."""
        while (request := queue.get()) is not None:
            try:
                self._resolve(request)
            except BaseException:  # whatever a future's callback raises
                log.exception("a future's callback failed")
            del request  # else it is kept until the next one

    def _resolve(self, request: Request) -> None:
        """Serves a request, and tells its future."""
        future = request.future
        try:
            lane = self.dispatcher.acquire(request)
        except BaseException as error:  # noqa: BLE001 - a boundary: the future is the only one to tell
            future.fail(error)
            return
        if not future.claim():  # it was cancelled, or is late
            self.dispatcher.release(lane)
            return
        try:
            answer = self.answer(request, lane)
        except BaseException as error:  # noqa: BLE001 - a boundary: the future is the only one to tell
            future.set_exception(error)
        else:
            future.set_result(answer)

    def _expire(self) -> None:
        """Fails requests whose deadline passes while they wait."""
        due: list[tuple[float, int, weakref.ref[Request]]] = []
        numbers, limit = itertools.count(), _MIN_DUE
        while True:
            left_s = due[0][0] - time.monotonic() if due else threading.TIMEOUT_MAX
            try:
                entry = self._deadlines.get(timeout=min(max(0.0, left_s), threading.TIMEOUT_MAX))
            except Empty:
                request = heapq.heappop(due)[2]() if due else None
                if request is not None:
                    self._fail_late(request)
                del request
                continue
            if entry is None:
                return
            heapq.heappush(due, (entry[0], next(numbers), entry[1]))
            if len(due) >= limit:  # most of them are of requests that were answered
                due = [one for one in due if one[2]() is not None]
                heapq.heapify(due)
                limit = max(_MIN_DUE, 2 * len(due))

    def _fail_late(self, request: Request) -> None:
        """Fails a request, unless it is being served."""
        try:
            request.future.fail(request.late("waiting for a worker"))
        except BaseException:  # whatever a future's callback raises
            log.exception("a future's callback failed")
        if request.future.done():  # it may stay in its queue for long
            request.arrays = {}
