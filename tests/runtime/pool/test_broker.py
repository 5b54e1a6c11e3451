"""Futures, memory and slots together, without processes: a worker here is a function of packets."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from collections import deque
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from ortprep.errors import NoRoomError, PoolClosedError, PoolError, RequestTimeoutError
from ortprep.runtime.pool.broker import RequestBroker, RequestOptions
from ortprep.runtime.pool.memory import RegionTable
from ortprep.runtime.pool.messages import (
    HEAD_BYTES,
    IN_FILE,
    IN_PACKET,
    IN_SLOT,
    Head,
    Layout,
    MessageKind,
    PlaceReader,
    TensorPlace,
    _encode_places,
    decode_head,
    encode_tensors,
    lay_out,
)
from ortprep.runtime.pool.process import PacketChannel
from ortprep.runtime.pool.served_model import SlotMemory
from ortprep.runtime.pool.slots import PoolFuture, Slot
from ortprep.runtime.tensors.signatures import Signature

_FLOAT = np.dtype(np.float32)
DIED = PoolError("died")


class Received(NamedTuple):
    """A request as a worker has it."""

    head: Head
    packet: memoryview


class Office:
    """A broker with workers that do what a test tells them to."""

    opened: ClassVar[list[Office]] = []

    def __init__(self, *, workers: int = 1, max_bytes: int = 2**24, max_pending: int = 100) -> None:
        Office.opened.append(self)
        self.memory = RegionTable(32 * workers, 16 * workers, max_bytes)
        self.frames: dict[int, deque[Received]] = {n: deque() for n in range(workers)}
        self.kept: dict[int, SlotMemory] = {}
        self.sockets: dict[int, tuple[socket.socket, socket.socket]] = {}
        self.channels: dict[int, PacketChannel] = {}
        self.broker = RequestBroker(
            {"double": Signature("double", {"x": _FLOAT}, {"y": _FLOAT})}, self.memory, max_pending
        )
        for worker in range(workers):
            self.broker.add_worker(worker, ("double",))
            self.open(worker)

    def open(self, worker: int = 0) -> None:
        self.kept[worker] = SlotMemory(self.memory.descriptor, self.memory.file.size)
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

    def answer(self, worker: int = 0) -> None:
        """Has a worker go on until it has answered one request; a slot that has to grow comes later."""
        kind = None
        while kind is not MessageKind.DONE:
            packet = self.answer_to(worker, self.receive(worker).popleft())
            assert self.deliver(worker, packet) is None
            kind = decode_head(memoryview(packet), "test").kind

    def answer_to(self, worker: int, received: Received) -> bytes:
        head, packet = received
        if head.kind is MessageKind.GROW:
            return self.kept[worker].grown(head) or b""
        (place,) = PlaceReader([4], "test").read(packet, head, head.size)
        y = np.asarray(2 * self.kept[worker].read(place, _FLOAT, packet, head))
        return self.kept[worker].answer(head, lay_out((y.shape,), (y.nbytes,)), [y], 1000)

    def deliver(self, worker: int, *packets: bytes) -> Exception | None:
        """Hands answers in, as the supervisor does, and returns what was wrong with one."""
        replies: list[Slot] = []
        wrong: Exception | None = None
        for packet in packets:
            view = memoryview(packet)
            head = decode_head(view, "test")
            try:
                if head.kind is MessageKind.NEED:
                    self.broker.grow(worker, head.number, head.figure)
                else:
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
        self.memory.collect()
        return self.memory.used_bytes


@pytest.fixture(autouse=True)
def closed_offices():
    yield
    for office in Office.opened:
        office.close()
    Office.opened.clear()


def lying(number: int, place: TensorPlace) -> bytes:
    """An answer with one output at some place."""
    text = struct.pack(f"<IIQ{len(place.shape)}Q", place.base, len(place.shape), place.offset, *place.shape)
    return encode_tensors(MessageKind.DONE, number, Layout(text, (place,), (), 0), figure=1000)


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000])
def test_an_answer_is_its_requests_and_all_memory_comes_back(size):
    office = Office()
    for value in range(4):
        future = office.submit(value, size)
        office.answer()
        assert (future.result(0)["y"] == 2 * value).all()
        assert len(future.result(0)["y"]) == size
        assert office.used == 0


def test_a_slot_grows_once_for_inputs_of_a_size():
    office = Office()
    for number in range(3):
        future = office.submit(number, 100_000)
        size = office.receive()[0].head.size
        assert (size >= 800_000) == (number > 0)
        office.answer()
        assert (future.result(0)["y"] == 2 * number).all()


def test_an_answer_that_needs_more_than_there_is_fails_alone():
    office = Office(max_bytes=2**20)
    first, second = office.submit(1, 250_000), office.submit(2)
    packet = office.answer_to(0, office.receive().popleft())
    assert office.deliver(0, packet) is None
    assert isinstance(first.exception(0), NoRoomError)
    office.answer()
    assert second.result(0)["y"][0] == 4
    (dropped,) = office.receive()
    assert office.answer_to(0, dropped) == b""
    assert office.used == 0


def test_what_a_worker_had_is_served_by_another_also_where_its_slot_had_grown():
    office = Office(workers=2)
    futures = [office.submit(n, 100_000, retries=1) for n in range(4)]
    assert office.deliver(1, office.answer_to(1, office.receive(1).popleft())) is None
    office.lose(1)
    for _ in range(4):
        office.answer(0)
    assert [future.result(0)["y"][-1] for future in futures] == [0, 2, 4, 6]
    assert office.used == 0


def test_an_array_of_the_pool_is_not_copied_and_held_until_it_is_answered():
    office = Office()
    array = office.broker.empty("double", "x", (100_000,), RequestOptions())
    array[...] = 2
    future = office.broker.submit("double", {"x": array[50_000:]}, RequestOptions())
    assert future is not None
    del array
    assert office.used == 401_408
    office.answer()
    assert (future.result(0)["y"] == 4).all()
    assert office.broker.copied_in_bytes == 0
    assert office.used == 0


@pytest.mark.attack
@pytest.mark.parametrize(
    "place",
    [
        TensorPlace(IN_SLOT, 2**40, (10,)),
        TensorPlace(IN_SLOT, 401_408 - 39, (10,)),  # beyond its region
        TensorPlace(IN_SLOT, 0, (2**40,)),
        TensorPlace(IN_PACKET, 60, (10_000,)),  # beyond its packet
        TensorPlace(IN_FILE, 0, (10,)),  # any place in the file
        TensorPlace(IN_PACKET, 0, (2**62, 2**62, 0)),
        TensorPlace(IN_PACKET, 0, (0,) * 33),
    ],
)
def test_an_answer_that_cannot_be_fails_its_request_and_no_other(place):
    office = Office()
    futures = [office.submit(n, 100_000) for n in range(2)]
    received = office.receive().popleft()
    assert office.deliver(0, lying(received.head.number, place)) is not None
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
    layout = lay_out(((1,), (1,)), (4, 4))
    packet = encode_tensors(MessageKind.DONE, received.head.number, layout, figure=1)
    assert "different number of tensors" in str(office.deliver(0, packet))
    good = office.answer_to(0, received)
    assert office.deliver(1, good) is not None
    assert not any(future.done() for future in futures)
    assert office.deliver(0, good, good) is not None
    assert futures[0].result(0)["y"][0] == 0


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


def test_memory_held_by_arrays_is_an_error_in_the_end_and_waited_for_while_answers_come():
    office = Office(max_bytes=2**20)
    held = [office.broker.empty("double", "x", (250_000,), RequestOptions())]
    with pytest.raises(NoRoomError, match="full"):
        office.submit(1, 100_000)
    waiting = office.submit(1)
    with pytest.raises(RequestTimeoutError, match="no shared memory free"):
        office.submit(1, 100_000, timeout_s=1.5)
    thread = threading.Thread(target=office.submit, args=(1, 100_000))
    thread.start()
    held.clear()
    office.broker.expire()  # as the supervisor does when the array wakes it
    thread.join(300)
    office.answer()
    assert waiting.result(0)["y"][0] == 2


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


def test_memory_for_an_answer_is_a_wish_that_no_request_waits_for():
    office = Office(max_bytes=64 * 2**20)
    office.submit(1, 10)
    number = office.receive().popleft().head.number
    office.broker.grow(0, number, 64 * 2**20 - 64)  # what its answer takes, or a lie
    office.lose()
    office.open()
    futures = [office.submit(value, 10, may_wait=False) for value in (2, 3, 4)]
    assert None not in futures
    while office.receive():
        office.answer()
    assert all(future.done() for future in futures)


def allocated(office: Office) -> int:
    return os.fstat(office.memory.descriptor).st_blocks * 512


@pytest.mark.attack
def test_what_a_worker_wrote_where_it_may_not_goes_back_to_the_system_with_it():
    office = Office()
    future = office.submit(1, 100_000, retries=1)
    file, size = office.kept[0].file, office.memory.region_bytes
    for begin in (office.receive()[0].head.begin + size // 2, 7 * size, 20 * size + size // 2):
        file.view(begin, _FLOAT, (250_000,))[...] = 1
    assert allocated(office) > 3_000_000
    office.lose()
    assert allocated(office) <= office.memory.held_bytes
    office.open()
    office.answer()
    assert (future.result(0)["y"] == 2).all()


def test_a_request_of_a_worker_that_may_still_write_goes_on_in_other_memory():
    office = Office()
    future = office.submit(3, 100_000, retries=1)
    (received,) = office.receive()
    region = office.broker.set_aside(0)
    assert region is not None
    office.lose()
    office.open()
    assert office.receive()[0].head.begin != received.head.begin == region.begin
    office.memory.file.view(region.begin, _FLOAT, (100_000,))[...] = 9
    office.answer()
    assert (future.result(0)["y"] == 6).all()
    office.broker.give_back(region)
    assert office.used == 0


@pytest.mark.attack
def test_outputs_that_overlap_or_hide_bytes_are_refused():
    reader = PlaceReader([4] * 50, "answer of m")
    places = tuple([TensorPlace(IN_SLOT, 0, (2**18,))] * 50)
    text = _encode_places(places)
    head = Head(MessageKind.DONE, 1, tensors=50, text_bytes=len(text))
    packet = memoryview(bytes(HEAD_BYTES) + text)
    with pytest.raises(PoolError, match="outside of its memory"):
        reader.read(packet, head, 2**20)
    junk = memoryview(bytes(HEAD_BYTES) + text + bytes(1000))
    with pytest.raises(PoolError, match="1000 bytes too many"):
        reader.read(junk, head._replace(text_bytes=len(text) + 1000), 2**26)


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
