"""What the pool's thread does with a worker's packets, without processes: nothing late, nothing twice."""

from __future__ import annotations

import functools
import selectors
import threading
import time
from typing import Any, cast

import pytest

from ortprep.errors import PoolError, WorkerDiedError
from ortprep.runtime.pool.config import PoolConfig
from ortprep.runtime.pool.messages import decode_head
from ortprep.runtime.pool.supervisor import Supervisor
from ortprep.runtime.pool.worker_process import WorkerProcess
from ortprep.runtime.pool.worker_state import WorkerState, WorkerStats
from tests.runtime.pool.test_broker import Office, Received


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
