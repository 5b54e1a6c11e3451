"""Futures, memory and the ledger together, without processes: a worker here is a function of frames."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import PipelineError, PoolClosedError, PoolError, RequestTimeoutError
from pipeline.runtime.pool.arena import Arena, NoRoomError, Segment, size_class
from pipeline.runtime.pool.exchange import Exchange, Wires
from pipeline.runtime.pool.futures import PoolFuture
from pipeline.runtime.pool.gate import Order, WouldBlock
from pipeline.runtime.pool.requests import Signature
from pipeline.runtime.pool.tensor_headers import (
    HERE,
    TAKEN_AT,
    HeaderReader,
    TensorHeader,
    encode_headers,
    size_of,
)
from pipeline.runtime.pool.wire import NOWHERE, Frame, FrameReader, Kind, Span

_FLOAT = np.dtype(np.float32)
DIED = PoolError("died")


@dataclass
class MemorySegment:
    size: int
    bytes: NDArray[np.uint8] = field(init=False)
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = np.zeros(self.size, np.uint8)
        self.address = self.bytes.ctypes.data

    def unlink(self) -> None:
        pass


class Office:
    """An exchange with workers that do what a test tells them to."""

    def __init__(self, *, workers: int = 1, max_bytes: int = 2**24, max_pending: int = 100) -> None:
        self.segments: dict[int, MemorySegment] = {}
        self.frames: dict[int, deque[Frame]] = {n: deque() for n in range(workers)}
        self.watched: list[float] = []
        signature = Signature("double", {"x": _FLOAT}, {"y": _FLOAT})
        self.exchange = Exchange(
            {"double": signature},
            Arena(self.create, max_bytes),
            Wires(self.send, lambda: None, self.watched.append, lambda: None, lambda: None),
            max_pending,
        )
        for worker in range(workers):
            self.exchange.add_worker(worker, ("double",))
            self.exchange.open_worker(worker)

    def create(self, number: int, size: int) -> Segment:
        self.segments[number] = MemorySegment(size)
        return self.segments[number]

    def send(self, worker: int, data: bytes) -> None:
        frames = [frame for frame, _ in FrameReader("test").read(data)]
        self.frames[worker].extend(frame for frame in frames if frame.kind is not Kind.FORGET)

    def submit(self, value: float, size: int = 10, **order: Any) -> PoolFuture:
        x = np.full(size, value, np.float32)
        return self.exchange.submit("double", {"x": x}, Order(**order))

    def bytes_of(self, span: Span) -> NDArray[np.uint8]:
        return self.segments[span.segment].bytes[span.offset : span.offset + span.size]

    def begin(self, worker: int = 0) -> Frame:
        frame = self.frames[worker].popleft()
        assert frame.kind is Kind.RUN
        self.bytes_of(frame.first)[TAKEN_AT] = 1
        return frame

    def compute(self, frame: Frame) -> NDArray[np.float32]:
        block = self.bytes_of(frame.first)
        (header,) = HeaderReader().read(block)
        x = block[header.offset : header.offset + header.size].view(np.float32)
        return 2 * x

    def answer(self, worker: int = 0) -> None:
        """Serves a worker's next request, asking for memory if it needs some."""
        frame = self.begin(worker)
        y, span = self.compute(frame), frame.second
        need = 64 + y.nbytes
        if need > span.size:
            self.exchange.need(worker, frame.request, need)
            granted = self.frames[worker].pop()
            if granted.kind is Kind.DENY:
                self.tell(self.exchange.failed(worker, frame.request, PoolError("denied")))
                return
            assert (granted.kind, granted.request) == (Kind.GRANT, frame.request)
            span = granted.second
        self.finish(worker, frame, y, span)

    def finish(self, worker: int, frame: Frame, y: NDArray[np.float32], span: Span) -> None:
        header = TensorHeader(0, _FLOAT, y.shape, HERE, 64, y.nbytes)
        text = encode_headers([header])
        self.bytes_of(span)[: len(text)] = np.frombuffer(text, np.uint8)
        self.bytes_of(span)[64 : 64 + y.nbytes] = y.view(np.uint8)
        first = Span(span.segment, span.offset, 64 + y.nbytes)
        self.deliver(worker, Frame(Kind.DONE, 0, frame.request, first, NOWHERE, 1000))

    def deliver(self, worker: int, frame: Frame) -> PipelineError | None:
        answered = self.exchange.done(worker, [frame])
        self.tell(*answered.outcomes)
        return answered.error

    def lose(self, worker: int = 0, *, is_blamed: bool = True) -> None:
        self.frames[worker].clear()
        self.tell(*self.exchange.lose(worker, DIED, is_blamed=is_blamed))

    @staticmethod
    def tell(*outcomes: Any) -> None:
        for outcome in outcomes:
            if outcome is not None:
                outcome.tell()

    @property
    def used(self) -> int:
        return self.exchange.memory.used_bytes


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
    office.exchange.open_worker(0)
    office.answer()
    assert future.result(0)["y"][0] == 2


def test_only_what_was_begun_fails() -> None:
    office = Office()
    futures = [office.submit(n) for n in range(3)]
    office.begin()
    office.lose()
    assert futures[0].exception(0) is DIED
    office.exchange.open_worker(0)
    office.answer()
    office.answer()
    assert [future.result(0)["y"][0] for future in futures[1:]] == [2, 4]
    assert office.used == 0


def test_a_request_that_is_tried_again_can_be_not_begun_again() -> None:
    office = Office()
    future = office.submit(1, retries=1)
    office.begin()
    office.lose()
    office.exchange.open_worker(0)
    office.lose()
    office.exchange.open_worker(0)
    office.answer()
    assert future.result(0)["y"][0] == 2


def test_memory_granted_to_a_worker_that_died_is_not_granted_to_the_next_unasked() -> None:
    office = Office(workers=2)
    held = office.submit(5, 1_000_000)
    future = office.submit(1, 1_000_000, retries=1)
    frame = office.begin(1)
    office.exchange.need(1, frame.request, 2**24)  # more than there is while the other one holds some
    office.lose(1)
    assert [f.kind for f in office.frames[0]] == [Kind.RUN, Kind.RUN]
    office.answer(0)
    office.answer(0)
    assert held.result(0)["y"][0] == 10
    assert future.result(0)["y"][0] == 2


def test_an_answer_outside_of_its_memory_fails_its_request_and_gives_nothing_back_twice() -> None:
    office = Office()
    future = office.submit(1)
    frame = office.begin()
    wrong = Span(frame.second.segment, frame.second.offset + frame.second.size, 64)
    assert office.deliver(0, Frame(Kind.DONE, 0, frame.request, wrong)) is not None
    assert "outside" in str(future.exception(0))
    assert office.used == 0


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (0,) * 33, (2**40,)])
def test_an_answer_of_a_shape_that_cannot_be_is_an_error_and_gives_nothing_back_twice(
    shape: tuple[int, ...],
) -> None:
    office = Office()
    future = office.submit(1, 100_000)
    frame = office.begin()
    office.exchange.need(0, frame.request, 400_064)
    span = office.frames[0].pop().second
    text = encode_headers([TensorHeader(0, _FLOAT, shape, HERE, 64, size_of(_FLOAT, shape))])
    office.bytes_of(span)[: len(text)] = np.frombuffer(text, np.uint8)
    assert office.deliver(0, Frame(Kind.DONE, 0, frame.request, Span(span.segment, span.offset, 400_064)))
    assert isinstance(future.exception(0), PoolError)
    assert office.used == 0
    first, second = (office.exchange.arena.allocate(400_064) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.span != second.span


def test_an_answer_of_another_type_than_the_models_is_an_error() -> None:
    office = Office()
    future = office.submit(1)
    frame = office.begin()
    header = TensorHeader(0, np.dtype(np.int32), (1,), HERE, 64, 4)
    text = encode_headers([header])
    office.bytes_of(frame.second)[: len(text)] = np.frombuffer(text, np.uint8)
    office.deliver(0, Frame(Kind.DONE, 0, frame.request, frame.second))
    assert "other outputs" in str(future.exception(0))


def test_an_answer_to_nothing_leaves_those_before_it_answered() -> None:
    office = Office()
    future = office.submit(1)
    frame = office.begin()
    y, span = office.compute(frame), frame.second
    text = encode_headers([TensorHeader(0, _FLOAT, y.shape, HERE, 64, y.nbytes)])
    office.bytes_of(span)[: len(text)] = np.frombuffer(text, np.uint8)
    office.bytes_of(span)[64 : 64 + y.nbytes] = y.view(np.uint8)
    good = Frame(Kind.DONE, 0, frame.request, Span(span.segment, span.offset, 64 + y.nbytes))
    answered = office.exchange.done(0, [good, good])
    office.tell(*answered.outcomes)
    assert answered.error is not None
    assert future.result(0)["y"][0] == 2


def test_closing_while_a_request_is_written_leaves_nobody_waiting() -> None:
    office = Office()
    inside, go_on = threading.Event(), threading.Event()

    class SlowArray:
        def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[np.float32]:
            inside.set()
            go_on.wait(10)
            return np.ones(3, np.float32)

    errors: list[BaseException] = []

    def submit() -> None:
        try:
            office.exchange.submit("double", {"x": SlowArray()}, Order())
        except PoolClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=submit)
    thread.start()
    assert inside.wait(10)
    office.exchange.gate.close(PoolClosedError("closed"))
    go_on.set()
    assert office.exchange.wait_idle(10)
    thread.join()
    assert len(errors) == 1
    assert office.used == 0


def test_a_deadline_that_is_next_is_watched_and_passes() -> None:
    office = Office(workers=1)
    now = office.submit(1, timeout_s=0.0)
    later = office.submit(2, timeout_s=100.0)
    assert len(office.watched) == 1
    office.tell(*office.exchange.expire())
    assert isinstance(now.exception(0), RequestTimeoutError)
    assert not later.done()
    office.answer()
    office.answer()
    assert later.result(0)["y"][0] == 4
    assert office.used == 0


def test_memory_held_by_answers_in_use_is_an_error_at_once() -> None:
    office = Office(max_bytes=2**20)
    future = office.submit(1, 100_000)
    office.answer()
    kept = future.result(0)["y"]
    del future
    with pytest.raises(NoRoomError, match="full"):
        office.submit(1, 100_000)
    del kept
    office.submit(1, 100_000)
    office.answer()


def test_many_requests_of_unknown_answers_leave_room_for_one() -> None:
    office = Office(max_bytes=2**20)
    futures: list[PoolFuture] = []

    def fill() -> None:
        for _ in range(10):
            futures.append(office.submit(1, 50_000, copies=True, may_wait=False))

    with pytest.raises(WouldBlock):
        fill()
    assert 1 < len(futures) < 10
    while office.frames[0]:
        office.answer()
    assert [float(future.result(0)["y"][0]) for future in futures] == [2.0] * len(futures)
    assert office.used == 0


def test_who_waits_for_memory_does_not_wake_others_who_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # Room for two requests with their answers, and for one more without.
    office = Office(max_bytes=5 * size_class(200_064))
    known = office.submit(1, 50_000, copies=True)
    office.answer()
    assert known.result(0)["y"][0] == 2
    futures = [office.submit(n, 50_000, copies=True) for n in range(2)]
    tries, allocate = [0], office.exchange.arena.allocate

    def count(size: int) -> Any:
        tries[0] += 1
        return allocate(size)

    monkeypatch.setattr(office.exchange.arena, "allocate", count)

    def submit() -> None:
        futures.append(office.submit(7, 50_000, copies=True, timeout_s=20))

    threads = [threading.Thread(target=submit) for _ in range(2)]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.3)
    assert tries[0] <= 8
    for thread in threads:
        while thread.is_alive() or office.frames[0]:
            if office.frames[0]:
                office.answer()
            thread.join(0.01)
    assert all(future.done() for future in futures)


def test_a_hard_stop_leaves_nothing_that_a_later_close_would_wait_for() -> None:
    office = Office()
    futures = [office.submit(n) for n in range(5)]
    office.begin()
    office.exchange.gate.close(PoolClosedError("closed"))
    office.tell(*office.exchange.abort())
    assert all(isinstance(future.exception(0), PoolClosedError) for future in futures)
    assert office.exchange.wait_idle(0)


def test_stranded_models_fail_what_waits_and_what_comes() -> None:
    office = Office()
    office.lose()
    waiting = [office.submit(n) for n in range(3)]
    office.tell(*office.exchange.strand("double", PoolError("no worker is left")))
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
            elif step == 3 and office.frames[worker]:
                office.answer(worker)
            elif step == 4 and office.frames[worker]:
                office.begin(worker)
                office.lose(worker, is_blamed=bool(generator.integers(2)))
                office.exchange.open_worker(worker)
            elif step == 5 and futures:
                next(reversed(futures)).cancel()
            if value > 120:
                break
        while any(office.frames.values()):
            for worker in range(3):
                if office.frames[worker]:
                    office.answer(worker)
        for future, sent in futures.items():
            assert future.done()
            if not future.cancelled() and future.exception(0) is None:
                assert (future.result(0)["y"] == np.float32(2 * sent)).all()
            else:
                assert future.cancelled() or future.exception(0) is DIED
        del future
        futures.clear()
        assert office.used == 0
