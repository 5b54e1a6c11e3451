"""Every request gets a lane or an error, and no lane has two requests, whatever happens to workers."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.errors import PoolClosedError, PoolError, RequestTimeoutError
from ortprep.runtime.packets import place_arrays
from ortprep.runtime.pool.dispatch import Dispatcher, Request
from ortprep.runtime.pool.memory import WorkerMemory
from ortprep.runtime.pool.service import Service
from tests.fakes import is_interrupted, wait_for

_STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "answer", "lose", "open", "withdraw"]), st.integers(0, 9)),
    max_size=80,
)
MODELS = {0: frozenset("a"), 1: frozenset("b"), 2: frozenset("ab")}


@dataclass(eq=False)
class FakeLane:
    """A lane of a worker, as far as the dispatcher knows lanes."""

    worker: Any
    process: object
    is_closed: bool = False

    def close(self):
        assert not self.is_closed
        self.is_closed = True


@dataclass
class Bench:
    """A dispatcher, the requests that entered and have not left, and the lanes that were made."""

    dispatcher: Dispatcher = field(default_factory=Dispatcher)
    requests: list[Request] = field(default_factory=list)
    lanes: list[FakeLane] = field(default_factory=list)
    processes: dict[int, object] = field(default_factory=dict)

    @property
    def serving(self):
        return [one for one in self.requests if one.lane is not None]

    def enter(self, one):
        self.dispatcher.enter(one)
        self.requests.append(one)

    def open(self, worker):
        if worker not in self.processes:
            process = self.processes[worker] = object()
            added = [FakeLane(SimpleNamespace(models=MODELS[worker]), process) for _ in range(2)]
            self.lanes += added
            self.dispatcher.open(process, added)

    def lose(self, worker):
        process = self.processes.pop(worker, None)
        if process is not None:
            self.dispatcher.retire(process)

    def answer(self, pick):
        if self.serving:
            one = self.serving[pick % len(self.serving)]
            self.requests.remove(one)
            self.dispatcher.release(one.lane)


def request(model="a", timeout_s=60.0):
    return Request(model, {"x": np.zeros(1)}, timeout_s)


@given(_STEPS)
def test_every_request_gets_one_lane_and_no_lane_has_two(steps):
    bench = Bench()
    for step, pick in steps:
        if step == "enter":
            bench.enter(request("ab"[pick % 2]))
        elif step == "answer":
            bench.answer(pick)
        elif step == "lose":
            bench.lose(pick % 3)
        elif step == "open":
            bench.open(pick % 3)
        elif bench.requests and bench.dispatcher.withdraw(one := bench.requests[pick % len(bench.requests)]):
            assert one.lane is None
            bench.requests.remove(one)
        lanes = [one.lane for one in bench.serving]
        assert len({id(lane) for lane in lanes}) == len(lanes)
        assert all(one.model in one.lane.worker.models for one in bench.serving if one.lane)
        assert all(one.waiter.locked() == (one.lane is None) for one in bench.requests)
        assert bench.dispatcher.pending == len(bench.requests)
    for worker in MODELS:
        bench.open(worker)
    while bench.serving:
        bench.answer(0)
    assert not bench.requests
    assert bench.dispatcher.wait_idle(0)
    for worker in MODELS:
        bench.lose(worker)
    assert all(lane.is_closed for lane in bench.lanes)


def test_the_worker_with_the_most_room_comes_first_and_requests_wait_in_order():
    bench = Bench()
    for worker in (0, 2):
        bench.open(worker)
    for _ in range(4):
        bench.enter(request())
    first, second, *_ = [one.lane.process for one in bench.serving if one.lane]
    assert first is not second
    waiting = [request("b"), request("a"), request("a")]
    for one in waiting:
        bench.enter(one)
    lane = next(one for one in bench.serving if one.lane and one.lane.process is bench.processes[0])
    bench.answer(bench.serving.index(lane))
    # The first that its worker has the model of.
    assert [one.lane is not None for one in waiting] == [False, True, False]


class StopError(BaseException):
    """What another thread raises in one that waits."""


@pytest.mark.attack
def test_a_thread_that_is_stopped_while_it_waits_takes_no_lane_with_it():
    bench, stopped = Bench(), threading.Event()

    def wait():
        with pytest.raises(StopError):
            bench.dispatcher.acquire(request())
        stopped.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while not bench.dispatcher.pending:
        time.sleep(0.001)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(StopError))
    bench.dispatcher._waiting[0].waiter.release()  # it comes to that when it wakes
    thread.join(60)
    assert stopped.is_set()
    assert bench.dispatcher.pending == 0


@pytest.mark.attack
def test_a_lane_that_came_as_its_request_stopped_waiting_is_free():
    bench = Bench()

    class Stopped(Request):
        @property
        def deadline(self):
            bench.open(0)
            raise StopError

    with pytest.raises(StopError):
        bench.dispatcher.acquire(Stopped("a", {}))
    assert bench.dispatcher.pending == 0
    for _ in range(2):
        bench.enter(request())
    assert len(bench.serving) == 2


def test_a_request_that_was_taken_is_tried_again_while_the_pool_is_drained():
    bench = Bench()
    bench.dispatcher.close(PoolClosedError("closed"))
    taken = request("a")
    assert not bench.dispatcher.enter(taken, is_first=True)
    with pytest.raises(PoolClosedError):
        bench.enter(request("a"))
    bench.dispatcher.fail(PoolClosedError("closed"))
    assert isinstance(taken.error, PoolClosedError)


def test_a_drained_pool_is_not_idle_while_a_request_changes_its_lane():
    bench, idle = Bench(), []
    bench.open(0)
    taken = request("a", timeout_s=0)
    bench.enter(taken)
    lost, taken.lane = taken.lane, None
    bench.lose(0)
    lost.close = lambda: idle.append(bench.dispatcher.wait_idle(0))
    bench.dispatcher.close(PoolClosedError("closed"))
    with pytest.raises(RequestTimeoutError):
        bench.dispatcher.acquire(taken, lost=lost)
    assert idle == [False]
    assert bench.dispatcher.wait_idle(0)


def test_a_model_without_workers_and_a_closed_dispatcher_refuse_what_waits_and_what_comes():
    bench = Bench()
    waiting = [request("a"), request("b")]
    for one in waiting:
        bench.enter(one)
    bench.dispatcher.fail(PoolError("no worker is left for a"), ["a"])
    with pytest.raises(PoolError, match="no worker is left"):
        bench.enter(request("a"))
    assert isinstance(waiting[0].error, PoolError)
    assert not waiting[0].waiter.locked()
    assert waiting[1].waiter.locked()
    bench.dispatcher.fail(PoolClosedError("closed"))
    assert isinstance(waiting[1].error, PoolClosedError)
    with pytest.raises(PoolClosedError):
        bench.dispatcher.acquire(request("b"))


@pytest.mark.attack
def test_a_worker_s_memory_stays_while_an_array_of_it_is_copied():
    descriptor = WorkerMemory.create()
    memory = WorkerMemory(descriptor)
    os.close(descriptor)
    window = memory.requests(0)
    window.write([np.arange(6.0)], place_arrays([48]))
    array = window.read(np.dtype(float), (2, 3), 0)
    memory.close()  # the worker has died
    array += 1
    assert array.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.attack
def test_a_call_that_a_signal_interrupts_at_any_step_leaves_no_thread(monkeypatch):
    def count_threads():
        return len(list(Path("/proc/self/task").iterdir()))

    monkeypatch.setattr(Service, "answer", lambda *_: {})
    before, step, goes_on = count_threads(), 1, True
    while goes_on:
        service = Service({})
        goes_on = is_interrupted(functools.partial(service.answer_aside, Request("m", {})), step)
        service.stop()
        wait_for(lambda: count_threads() == before, what="no thread is left")
        step += 1
    assert step > 5
