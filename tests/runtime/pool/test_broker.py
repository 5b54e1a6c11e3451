"""Futures, memory and slots together, without processes: a worker here is a function of packets."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import deque
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from ortprep.errors import PoolClosedError, PoolError, RequestTimeoutError
from ortprep.runtime.ipc import MemoryFile, copy_arrays, encode_shape
from ortprep.runtime.pool.broker import RequestBroker, RequestOptions
from ortprep.runtime.pool.memory import RegionTable
from ortprep.runtime.pool.messages import (
    LayoutReader,
    MessageKind,
    decode_head,
    encode_answer,
    encode_head,
    lay_out,
)
from ortprep.runtime.pool.packet_channel import PacketChannel
from ortprep.runtime.pool.slots import PoolFuture, Slot
from ortprep.runtime.tensors.signatures import Signature

_FLOAT = np.dtype(np.float32)
DIED = PoolError("died")


class Received(NamedTuple):
    """A request as a worker has it."""

    head: Any
    packet: memoryview


class Office:
    """A broker with workers that do what a test tells them to."""

    opened: ClassVar[list[Office]] = []

    def __init__(
        self, *, workers: int = 1, max_bytes: int = 2**24, max_pending: int = 100, output: Any = _FLOAT
    ) -> None:
        Office.opened.append(self)
        self.memory = RegionTable(16 * workers, max_bytes)
        self.frames: dict[int, deque[Received]] = {n: deque() for n in range(workers)}
        self.files: dict[int, MemoryFile] = {}
        self.sockets: dict[int, tuple[socket.socket, socket.socket]] = {}
        self.channels: dict[int, PacketChannel] = {}
        self.broker = RequestBroker(
            {"double": Signature("double", {"x": _FLOAT}, {"y": output})}, self.memory, max_pending
        )
        for worker in range(workers):
            self.broker.add_worker(worker, ("double",))
            self.open(worker)

    def open(self, worker: int = 0) -> None:
        self.files[worker] = MemoryFile(len(self.memory.file.memory), self.memory.file.descriptor)
        self.sockets[worker] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sockets[worker][1].setblocking(False)
        self.channels[worker] = PacketChannel(self.sockets[worker][0])
        self.broker.open_worker(worker, self.channels[worker])

    def submit(self, value: float, size: int = 10, **options: Any) -> PoolFuture:
        future = self.broker.submit(
            "double", {"x": np.full(size, value, np.float32)}, RequestOptions(**options)
        )
        assert future is not None
        return future

    @property
    def is_closed(self) -> bool:
        """Whether the broker takes no more requests."""
        return self.broker._closed_by is not None

    def receive(self, worker: int = 0) -> deque[Received]:
        """What a worker has been sent and has not answered."""
        while worker in self.sockets:
            self.channels[worker].flush()
            try:
                packet = memoryview(self.sockets[worker][1].recv(2**17))
            except BlockingIOError:
                break
            self.frames[worker].append(Received(decode_head(packet, "test"), packet))
        return self.frames[worker]

    def answer(self, worker=0):
        """Has a worker answer one request."""
        assert self.deliver(worker, self.answer_to(worker, self.receive(worker).popleft())) is None

    def answer_to(self, worker, received):
        head, packet = received
        layout = LayoutReader([4], "test").read(packet, head, head.size)
        buffer, begin = (self.files[worker].memory, head.begin) if layout.slot_bytes else (packet, 0)
        y = 2 * np.ndarray(layout.shapes[0], _FLOAT, buffer, begin + layout.offsets[0])
        if layout.slot_bytes:
            copy_arrays([y], layout.offsets, self.files[worker].memory, begin + layout.slot_bytes)
        return encode_answer(head.number, layout, [y], service_ns=1000)

    def deliver(self, worker: int, *packets: bytes) -> Exception | None:
        """Hands answers in, as the supervisor does, and returns what was wrong with one."""
        replies: list[Slot] = []
        wrong: Exception | None = None
        for packet in packets:
            view = memoryview(packet)
            head = decode_head(view, "test")
            try:
                replies.append(self.broker.read(worker, head, view, position=len(replies)))
            except (PoolError, ValueError) as error:
                wrong = error
        self.broker.done(worker, replies)
        self.broker.resolve_ended()
        return wrong

    def lose(self, worker: int = 0, *, fails_oldest: bool = True) -> None:
        self.receive(worker).clear()
        for end in self.sockets.pop(worker):
            end.close()
        self.broker.lose(worker, DIED, fails_oldest=fails_oldest)
        self.broker.resolve_ended()

    def supervise(self) -> None:
        """Does what the supervisor does whenever it is woken."""
        self.broker.expire()
        self.broker.resolve_ended()

    def abort(self) -> None:
        """Fails what is unanswered, as a pool that is closed does once its workers have ended."""
        for worker in self.sockets:
            self.receive(worker).clear()
        self.broker.abort()
        self.broker.resolve_ended()

    def close(self) -> None:
        for ends in self.sockets.values():
            for end in ends:
                end.close()
        self.memory.close()

    @property
    def used(self) -> int:
        return self.memory.used_bytes


@pytest.fixture(autouse=True)
def closed_offices():
    yield
    for office in Office.opened:
        office.close()
    Office.opened.clear()


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000])
def test_an_answer_is_its_requests_and_all_memory_comes_back(size):
    office = Office()
    for value in range(4):
        future = office.submit(value, size)
        office.answer()
        assert (future.result(0)["y"] == 2 * value).all()
        assert len(future.result(0)["y"]) == size
        assert office.used == 0


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_a_worker_had_is_served_by_another(size):
    office = Office(workers=2)
    futures = [office.submit(n, size, retries=1) for n in range(4)]
    office.answer_to(1, office.receive(1).popleft())  # was written, and not sent
    office.lose(1)
    for _ in range(4):
        office.answer(0)
    assert [future.result(0)["y"][-1] for future in futures] == [0, 2, 4, 6]
    assert office.used == 0
    assert len(office.memory._free) == 64


@pytest.mark.attack
@pytest.mark.parametrize(
    "shape",
    [
        (2**22 - 100_000 + 1,),  # beyond its region
        (2**40,),
        (100,),  # beyond its packet
        (2**62, 2**62, 0),
        (0,) * 33,
    ],
)
def test_an_answer_that_cannot_be_fails_its_request_and_no_other(shape):
    office = Office()
    futures = [office.submit(n, 100_000) for n in range(2)]
    received = office.receive().popleft()
    text = encode_shape(shape)
    packet = encode_head(MessageKind.DONE, received.head.number, text_bytes=len(text), figure=1) + text
    assert office.deliver(0, packet) is not None
    assert not any(future.done() for future in futures)
    office.lose()
    assert str(futures[0].exception(0)) == str(DIED)
    office.open()
    office.answer()
    assert futures[1].result(0)["y"][0] == 2
    assert office.used == 0


@pytest.mark.attack
def test_an_answer_with_other_outputs_than_the_models_or_another_workers_is_an_error():
    office = Office(workers=2)
    futures = [office.submit(n) for n in range(2)]
    received = office.receive(0).popleft()
    one = np.ones(1, np.float32)
    packet = encode_answer(received.head.number, lay_out(((1,), (1,)), (4, 4)), [one, one], service_ns=1)
    assert "bytes too many" in str(office.deliver(0, packet))
    good = office.answer_to(0, received)
    assert office.deliver(1, good) is not None
    assert not any(future.done() for future in futures)
    assert office.deliver(0, good, good) is not None
    assert futures[0].result(0)["y"][0] == 0


@pytest.mark.attack
@pytest.mark.parametrize("size", [3, 100_000])
def test_a_boolean_that_is_none_is_no_answer(size):
    """Operators answer such bytes with memory that they never wrote."""
    office = Office(output=np.dtype(np.bool_))
    future = office.submit(0, size)
    received = office.receive().popleft()
    answer = np.full(size, 255, np.uint8).view(np.bool_)
    layout = lay_out(((size,),), (1,))
    if layout.slot_bytes:
        begin = (
            received.head.begin
            + LayoutReader([4], "test").read(received.packet, received.head, 2**22).slot_bytes
        )
        copy_arrays([answer], layout.offsets, office.files[0].memory, begin)
    packet = encode_answer(received.head.number, layout, [answer], service_ns=1)
    assert "neither 0 nor 1" in str(office.deliver(0, packet))
    assert not future.done()


def test_every_request_of_a_lost_worker_ends_whatever_fails_on_the_way(monkeypatch):
    office = Office()
    futures = [office.submit(n, 100_000) for n in range(3)]

    def fail(*_: object) -> None:
        raise RuntimeError("the books contradict each other")

    with monkeypatch.context() as patch:
        patch.setattr(office.memory, "release", fail)
        for call in (office.lose, office.broker.abort):
            with pytest.raises(RuntimeError):
                call()
    office.broker.resolve_ended()
    assert [str(future.exception(0)) for future in futures] == [str(DIED), *["pool was closed"] * 2]


def test_closing_while_a_request_is_written_leaves_nobody_waiting():
    office = Office()
    inside, go_on = threading.Event(), threading.Event()

    class SlowArray:
        def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[np.float32]:
            inside.set()
            go_on.wait(300)
            return np.ones(3, np.float32)

    errors: list[BaseException] = []

    def submit() -> None:
        try:
            office.broker.submit("double", {"x": SlowArray()}, RequestOptions())
        except PoolClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    assert inside.wait(300)
    office.broker.close(PoolClosedError("closed"))
    go_on.set()
    assert office.broker.wait_idle(300)
    thread.join()
    assert len(errors) == 1
    assert office.used == 0


def test_a_deadline_that_is_next_is_watched_and_passes():
    office = Office(workers=1)
    office.broker.wakeup.planned = time.monotonic() + 50
    now = office.submit(1, timeout_s=0.0)
    assert os.eventfd_read(office.broker.wakeup.descriptor) == 1
    later = office.submit(2, timeout_s=100.0)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(office.broker.wakeup.descriptor)
    office.broker.expire()
    office.broker.resolve_ended()
    assert isinstance(now.exception(0), RequestTimeoutError)
    assert not later.done()
    office.answer()
    office.answer()
    assert later.result(0)["y"][0] == 4
    assert office.used == 0


def test_a_request_waits_for_memory_until_another_is_answered():
    office = Office(max_bytes=2**20)
    first, second = office.submit(1, 100_000), office.submit(1, 100_000)
    with pytest.raises(RequestTimeoutError, match="no shared memory free"):
        office.submit(1, 100_000, timeout_s=0.05)
    futures = []
    thread = threading.Thread(target=lambda: futures.append(office.submit(2, 100_000)), daemon=True)
    thread.start()
    small = office.submit(3)  # which needs none
    for _ in range(3):
        office.answer()
    assert first.result(0)["y"][0] == second.result(0)["y"][0] == 2
    thread.join(300)
    office.answer()
    assert small.done()
    assert futures[0].done()


def test_a_caller_that_may_not_wait_is_told():
    office = Office(max_pending=1)
    office.submit(1)
    inputs = {"x": np.ones(3, np.float32)}
    assert office.broker.submit("double", inputs, RequestOptions(may_wait=False)) is None
    with pytest.raises(RequestTimeoutError, match="1 requests before it"):
        office.submit(2, timeout_s=0.05)


def test_a_hard_stop_leaves_nothing_that_a_later_close_would_wait_for():
    office = Office()
    futures = [office.submit(n) for n in range(5)]
    office.broker.close(PoolClosedError("closed"))
    office.broker.abort()
    office.broker.resolve_ended()
    assert all(isinstance(future.exception(0), PoolClosedError) for future in futures)
    assert office.broker.wait_idle(0)


def test_unavailable_models_fail_what_waits_and_what_comes():
    office = Office()
    office.lose()
    waiting = [office.submit(n) for n in range(3)]
    office.broker.mark_unavailable("double", PoolError("no worker is left"))
    office.broker.resolve_ended()
    assert ["no worker" in str(future.exception(0)) for future in waiting] == [True] * 3
    with pytest.raises(PoolError, match="no worker is left"):
        office.submit(1)
    assert office.used == 0


def test_every_future_ends_however_the_work_goes():
    generator = np.random.default_rng(0)
    for _round in range(30):
        office = Office(workers=3, max_pending=1000)
        futures: dict[PoolFuture, float] = {}
        for value in itertools.count():
            step = generator.integers(6)
            worker = int(generator.integers(3))
            if step < 3:
                size = int(generator.choice([1, 100, 20_000]))
                future = office.submit(value, size, retries=int(generator.integers(3)))
                futures[future] = value
            elif step == 3 and office.receive(worker):
                office.answer(worker)
            elif step == 4 and office.receive(worker):
                office.lose(worker, fails_oldest=bool(generator.integers(2)))
                office.open(worker)
            elif step == 5 and futures:
                next(reversed(futures)).cancel()
            if value > 120:
                break
        while any(office.receive(worker) for worker in range(3)):
            for worker in range(3):
                if office.receive(worker):
                    office.answer(worker)
        for future, sent in futures.items():
            assert future.done()
            if not future.cancelled() and future.exception(0) is None:
                assert (future.result(0)["y"] == np.float32(2 * sent)).all()
            else:
                assert future.cancelled() or str(future.exception(0)) == str(DIED)
        assert office.used == 0


def allocated(office: Office) -> int:
    return os.fstat(office.memory.file.descriptor).st_blocks * 512


@pytest.mark.attack
def test_what_a_worker_wrote_where_it_may_not_goes_back_to_the_system_with_it():
    office = Office()
    future = office.submit(1, 100_000, retries=1)
    file, size = office.files[0], office.memory.region_bytes
    for begin in (office.receive()[0].head.begin + size // 2, 7 * size, 20 * size + size // 2):
        np.ndarray((250_000,), _FLOAT, file.memory, begin)[...] = 1
    assert allocated(office) > 3_000_000
    office.lose()
    assert allocated(office) <= office.memory.held_bytes
    office.open()
    office.answer()
    assert (future.result(0)["y"] == 2).all()


def test_an_answer_that_nobody_has_read_outlives_another_workers_death():
    office = Office(workers=2)
    futures = [office.submit(value, 100_000, retries=1) for value in (1, 2)]
    lost, other = (0, 1) if office.receive(0) else (1, 0)
    answer = office.answer_to(other, office.receive(other).popleft())
    office.lose(lost)
    assert office.deliver(other, answer) is None
    office.open(lost)
    for worker in (lost, other):
        while office.receive(worker):
            office.answer(worker)
    assert all(
        (future.result(0)["y"] == 2 * value).all() for value, future in zip((1, 2), futures, strict=True)
    )


def test_memory_that_a_lost_worker_may_still_write_to_is_not_used_again():
    office = Office()
    large, small = office.submit(3, 100_000, retries=1), office.submit(4, retries=1)
    begins = []
    for future in (large, small):
        begins.append(office.receive()[0].head.begin)
        region = office.broker.set_aside(0, DIED)
        assert region.begin == begins[-1]
        assert region.is_for_answer == (future is small)
        office.broker.resolve_ended()
        assert future.done() == (future is large)  # its inputs were there
        office.lose(fails_oldest=future is small)
        office.open()
        assert all(received.head.begin not in begins for received in office.receive())
    office.answer()
    assert (small.result(0)["y"] == 8).all()


def test_a_signal_that_breaks_off_the_bookkeeping_closes_the_pool(monkeypatch):
    office = Office()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(office.broker.slots, "admit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        office.submit(1)
    with pytest.raises(PoolError, match=r"interrupted by a signal; pool closed\n  got KeyboardInterrupt"):
        office.submit(2)
    assert office.broker.wakeup.stop_at is not None
    assert office.memory.used_bytes == 0
