"""Futures, memory and the ledger together, without processes: a worker here is a function of packets."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from ortprep.errors import NoRoomError, PoolClosedError, PoolError, RequestTimeoutError
from ortprep.runtime.pool.admission import RequestOptions
from ortprep.runtime.pool.answers import WorkerReply
from ortprep.runtime.pool.broker import RequestBroker
from ortprep.runtime.pool.channel import PacketChannel
from ortprep.runtime.pool.futures import PoolFuture
from ortprep.runtime.pool.memory import Arena, pack_inline, size_class
from ortprep.runtime.pool.messages import (
    IN_BLOCK,
    IN_PACKET,
    Head,
    Layout,
    MessageKind,
    PlaceReader,
    Span,
    TensorPlace,
    decode_head,
    decode_offsets,
    encode_tensors,
    lay_out,
)
from ortprep.runtime.pool.pool_memory import PoolMemory
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
        self.memory = PoolMemory(workers, max_bytes)
        self.frames: dict[int, deque[Received]] = {n: deque() for n in range(workers)}
        self.begun = [0] * workers
        self.arenas: dict[int, Arena] = {}
        self.sockets: dict[int, tuple[socket.socket, socket.socket]] = {}
        self.channels: dict[int, PacketChannel] = {}
        self.broker = RequestBroker(
            {"double": Signature("double", {"x": _FLOAT}, {"y": _FLOAT})},
            self.memory,
            max_pending,
        )
        for worker in range(workers):
            self.broker.add_worker(worker, ("double",))
            self.open(worker)

    def open(self, worker: int = 0) -> None:
        taken, region = self.memory.begin_worker(worker), self.memory.region(worker)
        self.arenas[worker], self.begun[worker] = Arena(self.memory.file, region, region.size, taken), 0
        self.sockets[worker] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sockets[worker][1].setblocking(False)
        self.channels[worker] = PacketChannel(self.sockets[worker][0])
        self.broker.open_worker(worker, self.channels[worker])

    def submit(self, value: float, size: int = 10, **options: Any) -> PoolFuture:
        x = np.full(size, value, np.float32)
        return self.broker.submit("double", {"x": x}, RequestOptions(**options))

    def receive(self, worker: int = 0) -> deque[Received]:
        """What a worker has been sent and has not begun."""
        self.channels[worker].flush()
        while worker in self.sockets:
            try:
                packet = memoryview(self.sockets[worker][1].recv(2**17))
            except BlockingIOError:
                break
            head = decode_head(packet, "test")
            if head.kind is MessageKind.RELEASE:
                for offset in decode_offsets(packet):
                    self.arenas[worker].release(offset)
            elif head.kind is MessageKind.RUN:
                self.frames[worker].append(Received(head, packet))
            self.channels[worker].flush()
        return self.frames[worker]

    def begin(self, worker: int = 0) -> Received:
        received = self.receive(worker).popleft()
        self.begun[worker] = received.head.number
        return received

    def compute(self, received: Received) -> NDArray[np.float32]:
        head, packet = received
        (place,) = PlaceReader([4], "test").read(packet, head)
        base = {IN_PACKET: np.frombuffer(packet, np.uint8), IN_BLOCK: self.memory.file.bytes[head.block :]}
        data = base.get(place.base, self.memory.file.bytes)
        return np.asarray(2 * np.ndarray(place.shape, np.float32, data, place.offset))

    def answer(self, worker: int = 0) -> None:
        """Serves a worker's next request."""
        received = self.begin(worker)
        self.deliver(worker, self.answer_to(worker, received))

    def answer_to(self, worker: int, received: Received) -> bytes:
        y = self.compute(received)
        layout = lay_out((y.shape,), (y.nbytes,))
        block = self.arenas[worker].allocate(layout.block_bytes) if layout.block_bytes else Span()
        packet = encode_tensors(MessageKind.DONE, 0, received.head.number, layout, block, 1000, 0)
        if layout.block_bytes:
            self.memory.file.write(block, layout, [y])
            return packet
        return pack_inline(packet, layout, [y])

    def deliver(self, worker: int, *packets: bytes) -> Exception | None:
        """Hands answers in, and returns what was wrong with one."""
        replies: list[WorkerReply] = []
        wrong: Exception | None = None
        for packet in packets:
            view = memoryview(packet)
            head = decode_head(view, "test")
            try:
                replies.append(self.broker.read(worker, head, view, position=len(replies)))
            except (PoolError, ValueError) as error:
                wrong = error
        _, other = self.broker.done(worker, replies)
        self.broker.resolve_ended()
        return wrong or other

    def lose(self, worker: int = 0, *, is_blamed: bool = True) -> None:
        self.receive(worker).clear()
        for end in self.sockets.pop(worker):
            end.close()
        self.broker.lose(worker, DIED, blamed=self.begun[worker] if is_blamed else None)
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
def closed_offices() -> Iterator[None]:
    yield
    for office in Office.opened:
        office.close()
    Office.opened.clear()


def lying(number: int, place: TensorPlace, block: Span) -> bytes:
    """An answer with one output at some place."""
    text = struct.pack(f"<IIQ{len(place.shape)}Q", place.base, len(place.shape), place.offset, *place.shape)
    return encode_tensors(MessageKind.DONE, 0, number, Layout(text, (place,), (), 0), block, 1000, 0)


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000])
def test_an_answer_is_its_requests_and_all_memory_comes_back(size: int) -> None:
    office = Office()
    for value in range(4):
        future = office.submit(value, size)
        office.answer()
        assert (future.result(0)["y"] == 2 * value).all()
        assert len(future.result(0)["y"]) == size
        del future
    assert office.used == 0


def test_a_request_that_was_not_begun_is_not_to_blame() -> None:
    office = Office()
    future = office.submit(1)
    office.lose()
    assert not future.done()
    office.open(0)
    office.answer()
    assert future.result(0)["y"][0] == 2


def test_only_what_was_begun_fails() -> None:
    office = Office()
    futures = [office.submit(n) for n in range(3)]
    office.begin()
    office.lose()
    assert str(futures[0].exception(0)) == str(DIED)
    office.open(0)
    office.answer()
    office.answer()
    assert [future.result(0)["y"][0] for future in futures[1:]] == [2, 4]
    assert office.used == 0


def test_a_request_that_is_tried_again_can_be_not_begun_again() -> None:
    office = Office()
    future = office.submit(1, retries=1)
    office.begin()
    office.lose()
    office.open(0)
    office.lose()
    office.open(0)
    office.answer()
    assert future.result(0)["y"][0] == 2


def test_what_a_worker_had_in_memory_is_served_by_another() -> None:
    office = Office(workers=2)
    held = office.submit(5, 1_000_000)
    future = office.submit(1, 1_000_000, retries=1)
    office.begin(1)
    office.lose(1)
    assert len(office.receive(0)) == 2
    office.answer(0)
    office.answer(0)
    assert held.result(0)["y"][0] == 10
    assert future.result(0)["y"][0] == 2


def test_an_answer_that_is_handed_on_is_not_copied_and_held_until_it_is_answered() -> None:
    office = Office()
    first = office.submit(1, 100_000)
    office.answer()
    copied = office.broker.copied_in_bytes
    future = office.broker.submit("double", {"x": first.result(0)["y"]}, RequestOptions())
    del first
    assert office.used > 0
    office.answer()
    assert (future.result(0)["y"] == 4).all()
    assert office.broker.copied_in_bytes == copied
    del future
    assert office.used == 0


@pytest.mark.parametrize(
    ("place", "block"),
    [
        (TensorPlace(IN_BLOCK, 0, (10,)), Span(0, 4096)),  # memory that is not the worker's
        (TensorPlace(IN_BLOCK, 0, (10,)), Span(2**62, 4096)),
        (TensorPlace(IN_BLOCK, 4096 - 39, (10,)), None),  # beyond its block
        (TensorPlace(IN_PACKET, 60, (10_000,)), Span()),  # beyond its packet
        (TensorPlace(2, 0, (10,)), None),  # any place in the file
        (TensorPlace(IN_PACKET, 0, (2**62, 2**62, 0)), Span()),
        (TensorPlace(IN_PACKET, 0, (0,) * 33), Span()),
        (TensorPlace(IN_BLOCK, 0, (2**40,)), None),
    ],
)
def test_an_answer_that_cannot_be_fails_its_request_and_gives_nothing_back_twice(
    place: TensorPlace, block: Span | None
) -> None:
    office = Office()
    future = office.submit(1, 100_000)
    received = office.begin()
    own = office.arenas[0].allocate(4096) if block is None else block
    assert office.deliver(0, lying(received.head.number, place, own)) is not None
    assert not future.done()
    office.lose()
    assert str(future.exception(0)) == str(DIED)
    assert office.used == 0
    first, second = (office.memory.allocate(400_064) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first != second


def test_an_answer_with_other_outputs_than_the_models_is_an_error() -> None:
    office = Office()
    future = office.submit(1)
    received = office.begin()
    layout = lay_out(((1,), (1,)), (4, 4))
    packet = encode_tensors(MessageKind.DONE, 0, received.head.number, layout, Span(), 1, 0)
    assert "different number of tensors" in str(office.deliver(0, packet))
    office.lose()
    assert str(future.exception(0)) == str(DIED)


def test_a_worker_that_goes_on_after_an_answer_that_cannot_be_is_blamed_for_that_one() -> None:
    office = Office()
    futures = [office.submit(n, 100_000) for n in range(2)]
    received = office.begin()
    assert (
        office.deliver(0, lying(received.head.number, TensorPlace(IN_BLOCK, 0, (10,)), Span(0, 4096)))
        is not None
    )
    office.begin()
    office.lose()
    assert str(futures[0].exception(0)) == str(DIED)
    assert not futures[1].done()


@pytest.mark.parametrize("call", ["end_worker", "release"])
def test_every_request_of_a_lost_worker_ends_whatever_fails_on_the_way(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    office = Office()
    futures = [office.submit(n, 100_000) for n in range(3)]
    office.begin()

    def fail(*_: object) -> None:
        raise RuntimeError("the books contradict each other")

    with monkeypatch.context() as patch:
        patch.setattr(office.memory, call, fail)
        with pytest.raises(RuntimeError):
            office.lose()
        with pytest.raises(RuntimeError) if call == "release" else nullcontext():
            office.broker.abort()
    office.broker.resolve_ended()
    assert [str(future.exception(0)) for future in futures] == [
        str(DIED),
        "pool was closed",
        "pool was closed",
    ]


def test_an_answer_to_nothing_leaves_those_before_it_answered() -> None:
    office = Office()
    future = office.submit(1)
    good = office.answer_to(0, office.begin())
    assert office.deliver(0, good, good) is not None
    assert future.result(0)["y"][0] == 2


def test_an_answer_to_another_workers_request_is_an_error() -> None:
    office = Office(workers=2)
    futures = [office.submit(n) for n in range(2)]
    packet = office.answer_to(0, office.begin(0))
    assert office.deliver(1, packet) is not None
    assert not any(future.done() for future in futures)


def test_closing_while_a_request_is_written_leaves_nobody_waiting() -> None:
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
    office.broker.admission.close(PoolClosedError("closed"))
    go_on.set()
    assert office.broker.wait_idle(300)
    thread.join()
    assert len(errors) == 1
    assert office.used == 0


def test_a_deadline_that_is_next_is_watched_and_passes() -> None:
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


def test_memory_held_by_answers_in_use_is_an_error_in_the_end() -> None:
    office = Office(max_bytes=2**20)
    future = office.submit(1, 200_000)
    office.answer()
    kept = future.result(0)["y"]
    del future
    with pytest.raises(NoRoomError, match="full"):
        office.submit(1, 100_000)
    del kept
    office.submit(1, 100_000)
    office.answer()


def test_who_waits_for_memory_does_not_wake_others_who_do(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(max_bytes=2 * size_class(200_000))
    futures = [office.submit(n, 50_000, copy=True) for n in range(2)]
    tries, allocate = [0], office.memory.allocate

    def count(size: int) -> Any:
        tries[0] += 1
        return allocate(size)

    monkeypatch.setattr(office.memory, "allocate", count)

    def submit() -> None:
        futures.append(office.submit(7, 50_000, copy=True, timeout_s=300))

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.3)
    assert tries[0] <= 8
    for thread in threads:
        while thread.is_alive() or office.receive(0):
            if office.receive(0):
                office.answer()
            thread.join(0.01)
    assert all(future.done() for future in futures)


def test_a_hard_stop_leaves_nothing_that_a_later_close_would_wait_for() -> None:
    office = Office()
    futures = [office.submit(n) for n in range(5)]
    office.begin()
    office.broker.admission.close(PoolClosedError("closed"))
    office.broker.abort()
    office.broker.resolve_ended()
    assert all(isinstance(future.exception(0), PoolClosedError) for future in futures)
    assert office.broker.wait_idle(0)


def test_unavailable_models_fail_what_waits_and_what_comes() -> None:
    office = Office()
    office.lose()
    waiting = [office.submit(n) for n in range(3)]
    office.broker.mark_unavailable("double", PoolError("no worker is left"))
    office.broker.resolve_ended()
    assert ["no worker" in str(future.exception(0)) for future in waiting] == [True] * 3
    with pytest.raises(PoolError, match="no worker is left"):
        office.submit(1)
    assert office.used == 0


def test_every_future_ends_however_the_work_goes() -> None:
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
                office.begin(worker)
                office.lose(worker, is_blamed=bool(generator.integers(2)))
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
        del future
        futures.clear()
        assert office.used == 0
