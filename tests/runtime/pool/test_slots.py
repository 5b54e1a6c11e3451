"""Every slot is freed exactly once, in order, whatever happens to its worker."""

from __future__ import annotations

import functools
import math
import selectors
import threading
import time
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.errors import PoolError, WorkerDiedError
from ortprep.runtime.pool.config import PoolConfig
from ortprep.runtime.pool.messages import decode_head
from ortprep.runtime.pool.slots import Slot, SlotTable, depth_for
from ortprep.runtime.pool.supervisor import Supervisor
from ortprep.runtime.pool.worker_process import WorkerProcess
from ortprep.runtime.pool.worker_state import WorkerState, WorkerStats
from tests.runtime.pool.test_broker import Office, Received

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "fail", "answer", "lose", "open", "withdraw", "expire"]),
        st.integers(0, 9),
    ),
    max_size=120,
)


@given(_STEPS, st.integers(0, 2))
def test_every_slot_is_freed_exactly_once(steps, retries):
    table, ends, acquired, now = SlotTable(), Counter[int](), 0, 0.0
    models = {0: "a", 1: "b", 2: "ab"}
    abandoned: set[int] = set()
    for worker, names in models.items():
        table.add_worker(worker, frozenset(names))
        table.open_worker(worker)
    for step, pick in steps:
        now += 1.0
        worker = pick % 3
        sent = table.queue_of(worker).sent
        if step in ("admit", "fail"):
            acquired += 1
            deadline = now + 5 if pick > 6 else math.inf
            slot = Slot(acquired, "ab"[pick % 2], deadline, retries)
            table.acquire(slot)
            assert table.withdraw(acquired) is None  # while it is filled, it is its caller's
            if step == "admit":
                table.admit(slot)
            else:
                table.give_up(slot)
                ends[acquired] += 1
        elif step == "answer" and sent:
            slot = table.answer(worker, sent[0].number, now, service_s=0.01)
            ends[slot.number] += slot.number not in abandoned
        elif step == "lose":
            before = [slot.number for slot in sent]
            lost = {slot.number for slot in table.lose(worker, fails_oldest=pick < 5)}
            failed = lost - abandoned
            assert abandoned & set(before) <= lost <= set(before)
            assert failed == set() or (pick < 5 and failed == {before[0]})
            ends.update(failed)
        elif step == "open":
            table.open_worker(worker)
        elif step == "withdraw":
            withdrawn = table.withdraw(pick)
            if withdrawn is not None:
                assert withdrawn.worker is None
                ends[withdrawn.number] += 1
        elif step == "expire":
            for slot in table.expire(now):
                assert slot.deadline <= now
                abandoned.add(slot.number)
                ends[slot.number] += 1
        for slot, got in table.assign(now):
            assert slot.model in models[got]
            assert table.queue_of(got).is_open
        assert all(count <= 1 for count in ends.values())
    for worker in models:
        table.open_worker(worker)
    while len(table):
        list(table.assign(now))
        for worker in models:
            for slot in list(table.queue_of(worker).sent):
                table.answer(worker, slot.number, now)
                ends[slot.number] += slot.number not in abandoned
    assert ends == Counter(range(1, acquired + 1))


def make(workers: int = 1, models: str = "m") -> SlotTable:
    table = SlotTable()
    for worker in range(workers):
        table.add_worker(worker, frozenset(models))
        table.open_worker(worker)
    return table


def admit(table: SlotTable, *numbers: int, model: str = "m", retries: int = 0) -> list[tuple[int, int]]:
    for number in numbers:
        slot = Slot(number, model, retries=retries)
        table.acquire(slot)
        table.admit(slot)
    return assign(table)


def assign(table: SlotTable) -> list[tuple[int, int]]:
    return [(slot.number, worker) for slot, worker in table.assign(0.0)]


def test_slots_go_to_the_worker_with_the_fewest_up_to_its_depth():
    assert admit(make(3), 1, 2, 3, 4) == [(1, 0), (2, 1), (3, 2), (4, 0)]
    table = make()
    assert admit(table, 1, 2, 3) == [(1, 0), (2, 0)]
    table.answer(0, 1, 1.0, service_s=1e-5)
    assert assign(table) == [(3, 0)]
    assert depth_for(1e-5) == 16
    assert depth_for(0.0005) == 4
    assert depth_for(10.0) == depth_for(None) == 2


@pytest.mark.parametrize("blames", [True, False])
def test_the_oldest_is_blamed_once_for_each_of_its_tries_and_the_others_keep_their_turn(*, blames):
    table = make()
    admit(table, 1, 2, 3, retries=1)
    assert table.lose(0, fails_oldest=blames) == []
    table.open_worker(0)
    assert assign(table) == [(1, 0), (2, 0)]
    assert [slot.number for slot in table.lose(0)] == ([1] if blames else [])
    table.open_worker(0)
    assert assign(table)[0] == ((2, 0) if blames else (1, 0))


def test_no_model_waits_for_the_backlog_of_another():
    table = make(models="ab")
    order = admit(table, *range(1, 10), model="a") + admit(table, 10, model="b")
    order += admit(table, *range(11, 20), model="a")
    while table.queue_of(0).sent:
        table.answer(0, table.queue_of(0).sent[0].number, 1.0)
        order += assign(table)
    assert [number for number, _ in order] == list(range(1, 20))


def test_the_time_of_a_run_begins_when_its_turn_comes():
    table = make()
    admit(table, 1, 2)
    assert table.queue_of(0).since == 0.0
    table.answer(0, 1, 9.0)
    assert table.queue_of(0).since == 9.0
    table.close_worker(0)
    assert table.queue_of(0).since == math.inf


# -- what the pool's thread does with a worker's packets, without processes: nothing late, nothing twice


class Process:
    """A worker's process that a test plays."""

    output, sentinel, pid = 10**6, 10**6 + 1, 1

    def __init__(self, office: Office) -> None:
        self.channel, self.is_killed = office.channels[0], False

    def kill(self) -> None:
        self.is_killed = True

    def read_output(self) -> bytes:
        return b""

    def reap(self) -> int:
        return -9

    def close(self, *, waits: bool = True) -> None:
        del waits


class Watched:
    """A supervisor of one worker that is ready."""

    def __init__(self) -> None:
        self.office = Office()
        self.worker = WorkerState({}, cast("Any", None), WorkerStats(0, "cpu/0", "cpu", ("double",)))
        self.process = Process(self.office)
        self.worker.process = cast("WorkerProcess", self.process)
        self.worker.change("ready")
        self.supervisor = Supervisor([self.worker], PoolConfig(max_restarts=0), self.office.broker)
        self.office.broker.slots.open_worker(0)
        self.manager = self.supervisor.manager
        self.read = functools.partial(self.manager.read_packets, self.worker, self.worker.process)
        self.manager.selector.register(self.process.channel.descriptor, selectors.EVENT_READ, self.read)

    @property
    def far_end(self) -> Any:
        return self.office.sockets[0][1]

    def close(self) -> None:
        self.manager.selector.close()
        self.office.close()
        Office.opened.remove(self.office)


@pytest.fixture
def watched():
    one = Watched()
    yield one
    one.close()


def test_who_is_behind_a_request_that_was_answered_in_time_is_not_blamed(watched):
    first, second = watched.office.submit(1), watched.office.submit(2)
    received = watched.office.receive().popleft()
    watched.far_end.send(watched.office.answer_to(0, received))  # is in the socket when it is ended
    watched.manager.kill(watched.worker, PoolError("took too long"))
    watched.manager._has_ended(watched.worker, cast("WorkerProcess", watched.process))
    assert first.result(0)
    error = second.exception(0)  # no worker is left for it, and it is not what the last one died of
    assert isinstance(error, PoolError)
    assert not isinstance(error, WorkerDiedError)


def test_the_thread_sleeps_again_once_a_full_socket_has_room(watched):
    watched.office.broker.slots.queue_of(0).depth = 16
    futures = [watched.office.submit(1, 4090) for _ in range(16)]
    assert watched.process.channel._packets  # more than the socket holds
    watched.far_end.settimeout(60)

    def work() -> None:
        for _ in futures:
            packet = memoryview(watched.far_end.recv(2**17))
            watched.far_end.send(watched.office.answer_to(0, Received(decode_head(packet, "test"), packet)))

    thread = threading.Thread(target=work)
    thread.start()
    turns, end = 0, time.monotonic() + 60
    while not all(future.done() for future in futures) and time.monotonic() < end:
        watched.supervisor._turn()
        turns += 1
    thread.join()
    watched.manager.send_waiting()
    assert (
        watched.manager.selector.get_map()[watched.process.channel.descriptor].events == selectors.EVENT_READ
    )
    assert turns < 1000  # 140,000 a second, without
