"""What becomes of a request: a lane, an answer, another try after a worker died of it, or an error."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Mapping
from queue import SimpleQueue
from typing import TypeAlias

from ortprep.errors import PipelineError
from ortprep.runtime.pool.dispatch import Dispatcher, Request
from ortprep.runtime.pool.lane import Answer, Lane, LateError, LostError
from ortprep.runtime.tensors.signatures import Signature

Outcome: TypeAlias = Answer | BaseException
Helper: TypeAlias = SimpleQueue[tuple[Request, SimpleQueue[Outcome]] | None]
"""What a thread that serves the main thread's requests takes them from."""


class Service:
    """Serves requests on the thread that calls `answer`, those of the main thread on one of its own.

    A signal's handler may raise in the main thread between any two steps, so the main thread never changes
    what this and the dispatcher hold: it puts its request into a queue, and takes the outcome out of another,
    in one step each.

    Args:
        signatures: Types of the models by name, in the order of their numbers.
    """

    def __init__(self, signatures: Mapping[str, Signature]) -> None:
        self.dispatcher = Dispatcher()
        self._signatures = signatures
        self._numbers = {name: number for number, name in enumerate(signatures)}
        self._helper: Helper | None = None
        self._is_stopped = False

    def answer_aside(self, request: Request) -> Answer:
        """Does what `answer` does, for the main thread; raises as `SessionPool.run`."""
        helper: Helper | None = None
        try:
            helper, self._helper = self._helper, None  # an interrupted call leaves its thread to its request
            if helper is None:
                helper = SimpleQueue()
                try:
                    _thread.start_new_thread(self._help, (helper,))
                except RuntimeError:  # no thread to be had
                    return self.answer(request)
            outcomes: SimpleQueue[Outcome] = SimpleQueue()
            helper.put((request, outcomes))
            outcome = outcomes.get()
        except BaseException:  # a signal's handler may raise at any step
            if helper is not None:
                helper.put(None)
            raise
        self._helper = helper
        if self._is_stopped:  # meanwhile, by another thread
            self.stop()
        if not isinstance(outcome, BaseException):
            return outcome
        try:
            raise outcome
        finally:
            del outcome  # else the error's traceback would have the error

    def _help(self, helper: Helper) -> None:
        """Serves requests of the main thread until None comes."""
        while (call := helper.get()) is not None:
            request, outcomes = call
            try:
                outcome: Outcome = self.answer(request)
            except BaseException as error:  # noqa: BLE001 - a boundary: it is raised where the outcome is awaited
                outcome = error
            outcomes.put(outcome)
            del call, request, outcomes, outcome  # else they are kept until the next one

    def stop(self) -> None:
        """Ends the thread that serves the main thread."""
        self._is_stopped = True
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.put(None)

    def answer(self, request: Request) -> Answer:
        """Returns the outputs for a request, on this thread; raises as `SessionPool.run`."""
        lost: Lane | None = None
        while True:
            lane = self.dispatcher.acquire(request, lost=lost)
            try:
                return self._ask(request, lane)
            except LostError as loss:
                self.dispatcher.retire(lane.process)
                try:
                    if loss.is_to_blame:
                        self._count_retry(request, lane)
                except BaseException:  # an asynchronous one, too, must take no lane with it
                    self.dispatcher.release(lane)
                    raise
            request.lane, lost = None, lane

    def _count_retry(self, request: Request, lane: Lane) -> None:
        """Waits for the end of a lane's worker; raises why it ended unless the request may be repeated."""
        try:
            error = lane.find_loss(request.deadline - time.monotonic())
        except LateError:
            raise request.late(f"{lane.worker.name} had it") from None
        if request.retries <= 0:
            raise self.dispatcher.closed_error(error) from None
        request.retries -= 1

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
            lane.worker.note_answer()
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
            threading.Thread(target=self._finish, args=(lane,), daemon=True).start()
        except RuntimeError:  # no thread to be had: the caller is told late, but the lane is not lost
            self._finish(lane)

    def _finish(self, lane: Lane) -> None:
        lane.finish()
        self.dispatcher.release(lane)
