"""What becomes of a request: a lane, an answer, another try after a worker died of it, or an error."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue

from ortprep.errors import PipelineError, PoolError
from ortprep.runtime.pool.dispatch import Dispatcher, Request
from ortprep.runtime.pool.lane import THREADS, Answer, Lane, LateError, LostError, start_calls
from ortprep.runtime.tensors.signatures import Signature

log = logging.getLogger(__name__)


class Service:
    """Serves requests: of threads that wait, on those; and of futures, on the threads of lanes.

    A signal's handler may raise in the main thread between any two steps, so the main thread never changes
    what this and the dispatcher hold. It puts a request with a future into a queue, which the intake thread
    empties, and has another thread serve a request that it waits for.

    Args:
        signatures: Types of the models by name, in the order of their numbers.
    """

    def __init__(self, signatures: Mapping[str, Signature]) -> None:
        self.dispatcher = Dispatcher(self._serve)
        self._signatures = signatures
        self._numbers = {name: number for number, name in enumerate(signatures)}
        self._incoming: SimpleQueue[Request | None] = SimpleQueue()
        self._aside: SimpleQueue[Callable[[], None] | None] | None = None
        threading.Thread(target=self._take_in, name=f"{THREADS}-intake", daemon=True).start()

    def submit(self, request: Request) -> None:
        """Takes a request with a future, which is resolved whatever happens."""
        self._incoming.put(request)

    def stop(self) -> None:
        """Ends the intake; the threads of lanes end with those."""
        self._incoming.put(None)
        if self._aside is not None:
            self._aside.put(None)

    def answer_aside(self, request: Request) -> Answer:
        """Does what `answer` does, on a thread of its own, which waits for the next call; raises as `answer`.

        If this thread stops waiting, the other one ends once it has the answer.
        """
        calls, self._aside = self._aside or start_calls(f"{THREADS}-aside"), None
        try:
            calls.put(partial(self._resolve, request))
            return request.future.result()
        finally:
            if request.future.done():
                self._aside = calls
            else:
                calls.put(None)

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
            lane, is_first = None, True

    def _ask(self, request: Request, lane: Lane) -> Answer:
        """Asks a lane's worker, and releases the lane unless the worker is lost; raises as `Lane.ask`."""
        model, is_free = request.model, True
        try:
            answer = lane.ask(self._numbers[model], self._signatures[model], request.arrays, request.deadline)
        except LostError:
            is_free = False
            raise
        except LateError:
            is_free = False
            lane.run_later(partial(self._finish, lane))
            raise request.late(f"{lane.worker.name} has it") from None
        except PipelineError:
            lane.worker.note_answer()
            raise
        else:
            lane.worker.note_answer(time.monotonic() - request.begun)
            return answer
        finally:
            if is_free:
                self.dispatcher.release(lane)

    def _finish(self, lane: Lane) -> None:
        """Waits until a lane can be used again whose request nobody waits for."""
        lane.finish()
        self.dispatcher.release(lane)

    def _serve(self, request: Request) -> None:
        assert request.lane is not None
        request.lane.run_later(partial(self._resolve, request))

    def _resolve(self, request: Request) -> None:
        """Serves a request, on its lane if it has one, and tells its future."""
        lane, future = request.lane, request.future
        try:
            answer = self.answer(request, lane)
        except BaseException as error:  # noqa: BLE001 - a boundary: the future is the only one to tell
            future.set_exception(error)
        else:
            future.set_result(answer)

    # The intake.

    def _take_in(self) -> None:
        """Takes requests in, and fails those whose deadline passes while they wait."""
        deadlines: list[tuple[float, int, Request]] = []
        numbers = itertools.count()
        while True:
            due = deadlines[0][0] if deadlines else math.inf
            try:
                left_s = min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX)
                request = self._incoming.get(timeout=None if due == math.inf else left_s)
            except Empty:
                self._expire(heapq.heappop(deadlines)[2])
                continue
            if request is None:
                return
            try:
                self.dispatcher.submit(request)
            except PoolError as error:
                if request.future.set_running_or_notify_cancel():
                    request.future.set_exception(error)
                continue
            if request.deadline < math.inf:
                heapq.heappush(deadlines, (request.deadline, next(numbers), request))

    def _expire(self, request: Request) -> None:
        future = request.future
        if not self.dispatcher.withdraw(request):  # it is running, or done
            return
        if future.set_running_or_notify_cancel():
            future.set_exception(request.late("waiting for a worker"))
