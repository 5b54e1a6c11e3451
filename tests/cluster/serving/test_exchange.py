"""The books of a pool hold whatever actors do; here they answer, or die, when they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pipeline.cluster.serving.exchange import Exchange
from pipeline.cluster.serving.packing import CALLS_AT_A_TIME, Call
from pipeline.errors import PoolClosedError, PoolError, RequestTimeoutError, RunError, WorkerDiedError
from pipeline.runtime.element_types import Array
from pipeline.runtime.pool.futures import PoolFuture
from pipeline.runtime.pool.gate import Order, WouldBlock
from pipeline.runtime.pool.requests import Signature

FLOAT = np.dtype(np.float32)
DIED = WorkerDiedError("node/cpu/0 died")


class Memory:
    """An object store in this process."""

    def __init__(self) -> None:
        self.put_bytes = 0

    def put(self, array: Array) -> Any:
        self.put_bytes += array.nbytes
        return array.copy()

    def view(self, reference: Any) -> Array:
        view: Array = reference.view()
        return view


class Actor:
    """Keeps the calls that it gets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[Call, list[float]]] = []

    def send(self, call: Call, requests: Sequence[tuple[str, Sequence[Any]]]) -> None:
        self.calls.append((call, [float(arrays[0].flat[0]) for _, arrays in requests]))


class Scene:
    """An exchange with actors."""

    def __init__(self, actors: int = 1, *, max_batch: int = 16, max_pending: int = 100) -> None:
        self.memory = Memory()
        signatures = {"net": Signature("net", {"x": FLOAT}, {"y": FLOAT})}
        self.exchange = Exchange(signatures, self.memory, max_pending, max_batch, lambda: None)
        self.actors: list[Actor] = []
        for number in range(actors):
            self.open(number)

    def open(self, number: int) -> None:
        actor = Actor(f"node/cpu/{number}")
        self.actors[number:] = [actor]
        self.exchange.add_worker(number, ["net"])
        self.exchange.open_worker(number, actor, ["net"])

    def ask(self, x: float, *, retries: int = 0, size: int = 1) -> PoolFuture:
        return self.exchange.submit("net", {"x": np.full((1, size), x, np.float32)}, Order(retries=retries))

    def answer(self, number: int, which: int = 0, nanoseconds: int = 1000) -> None:
        call, values = self.actors[number].calls.pop(which)
        results: list[Any] = [([np.full((1, 1), 2 * x, np.float32)], None, nanoseconds) for x in values]
        for outcome in self.exchange.answered(number, self.actors[number], call, results)[0]:
            outcome.tell()

    def answer_all(self) -> None:
        while any(actor.calls for actor in self.actors):
            for number, actor in enumerate(self.actors):
                if actor.calls:
                    self.answer(number)

    def lose(self, number: int, *, is_blamed: bool = True) -> None:
        for outcome in self.exchange.lose(number, DIED, is_blamed=is_blamed):
            outcome.tell()


def y(future: PoolFuture) -> float:
    return float(future.result(0)["y"][0, 0])


def test_what_comes_while_an_actor_is_at_two_calls_travels_together() -> None:
    scene = Scene()
    scene.ask(0)
    scene.answer(0)  # short runs: from now on it may have many at once
    futures = [scene.ask(x) for x in range(10)]
    assert [values for _, values in scene.actors[0].calls] == [[0.0], [1.0]]
    scene.answer(0)
    assert [values for _, values in scene.actors[0].calls] == [[1.0], [2.0, 3, 4, 5, 6, 7, 8, 9]]
    scene.answer_all()
    assert [y(future) for future in futures] == [2.0 * x for x in range(10)]


def test_answers_that_come_out_of_order_are_told_in_order_and_to_whom_they_belong() -> None:
    scene = Scene()
    first, second = scene.ask(1), scene.ask(2)
    scene.answer(0, which=1)
    assert not second.done()
    scene.answer(0)
    assert (y(first), y(second)) == (2.0, 4.0)


def test_a_death_is_held_against_the_oldest_call_alone() -> None:
    scene = Scene(max_batch=4)
    scene.ask(0)
    scene.answer(0)
    scene.ask(1)
    scene.ask(2)
    futures = [scene.ask(x, retries=x % 2) for x in range(10, 14)]
    behind = [scene.ask(x) for x in range(20, 23)]
    scene.answer(0)
    scene.answer(0)
    assert [values for _, values in scene.actors[0].calls] == [[10.0, 11, 12, 13], [20.0, 21, 22]]
    scene.lose(0)
    for future in (futures[0], futures[2]):
        with pytest.raises(WorkerDiedError, match="node/cpu/0 died"):
            future.result(0)
    scene.open(0)
    # Those that may be tried again travel alone: only the culprit can do it again.
    assert [values for _, values in scene.actors[0].calls] == [[11.0], [13.0]]
    scene.answer_all()
    assert [y(future) for future in (futures[1], futures[3], *behind)] == [22.0, 26.0, 40.0, 42.0, 44.0]


def test_an_actor_that_is_let_go_takes_nothing_with_it() -> None:
    scene = Scene(2)
    futures = [scene.ask(x) for x in range(4)]
    scene.lose(0, is_blamed=False)
    scene.answer_all()
    scene.open(0)
    scene.answer_all()
    assert [y(future) for future in futures] == [0.0, 2.0, 4.0, 6.0]


def test_nothing_is_sent_to_an_actor_that_is_gone_and_its_late_answers_do_not_count() -> None:
    scene = Scene()
    future = scene.ask(1, retries=1)
    late, gone = scene.actors[0].calls[0][0], scene.actors[0]
    scene.lose(0)
    scene.open(0)
    wrong: list[Any] = [([np.full((1, 1), 99, np.float32)], None, 1)]
    assert scene.exchange.answered(0, gone, late, wrong) == ([], [])
    for x in range(5):
        scene.ask(x)
    assert len(gone.calls) == 1
    scene.answer_all()
    assert y(future) == 2.0


def test_no_actor_has_more_than_its_calls_at_a_time() -> None:
    scene = Scene(3)
    for x in range(40):
        scene.ask(x)
        assert max(len(actor.calls) for actor in scene.actors) <= CALLS_AT_A_TIME


def test_a_large_input_is_put_into_the_store_once_whatever_it_takes() -> None:
    scene = Scene(2)
    array = np.ones((1, 100_000), np.float32)
    shared = scene.exchange.inputs.share(array)
    futures = [scene.exchange.submit("net", {"x": shared}, Order(retries=3)) for _ in range(2)]
    scene.lose(0)
    scene.lose(1)
    scene.open(0)
    scene.answer_all()
    assert [y(future) for future in futures] == [2.0, 2.0]
    assert scene.memory.put_bytes == array.nbytes


def test_a_deadline_is_told_with_who_has_the_request() -> None:
    scene = Scene()
    future = scene.exchange.submit("net", {"x": np.ones((1, 1), np.float32)}, Order(timeout_s=0.0))
    for outcome in scene.exchange.expire():
        outcome.tell()
    with pytest.raises(RequestTimeoutError, match="node/cpu/0 has it"):
        future.result(0)
    scene.answer_all()  # comes too late, and does no harm
    assert scene.exchange.counts == (0, 0)


def test_who_may_not_wait_for_room_is_told_so() -> None:
    scene = Scene(max_pending=1)
    scene.ask(1)
    with pytest.raises(WouldBlock):
        scene.exchange.submit("net", {"x": np.ones((1, 1), np.float32)}, Order(may_wait=False))


def test_a_model_without_workers_fails_what_waits_and_what_comes() -> None:
    scene = Scene(0)
    scene.exchange.add_worker(0, ["net"])
    waiting = scene.ask(1)
    for outcome in scene.exchange.strand("net", PoolError("no worker is left for net")):
        outcome.tell()
    with pytest.raises(PoolError, match="no worker is left"):
        waiting.result(0)
    with pytest.raises(PoolError, match="no worker is left"):
        scene.ask(2)
    scene.open(0)
    future = scene.ask(3)
    scene.answer_all()
    assert y(future) == 6.0


def test_a_closed_pool_fails_everything_that_is_left() -> None:
    scene = Scene()
    future = scene.ask(1)
    scene.exchange.gate.close(PoolClosedError("pool is closed"))
    for outcome in scene.exchange.abort():
        outcome.tell()
    with pytest.raises(PoolClosedError):
        future.result(0)
    with pytest.raises(PoolClosedError):
        scene.ask(2)


def test_what_a_worker_leaves_behind_of_a_model_nobody_else_has_fails() -> None:
    scene = Scene()
    futures = [scene.ask(x, retries=1) for x in range(2)]
    scene.exchange.close_worker(0)
    assert scene.exchange.strand("net", PoolError("no worker is left for net")) == []
    scene.lose(0)
    for future in futures:
        with pytest.raises(PoolError, match="no worker is left for net"):
            future.result(0)
    assert scene.exchange.counts == (0, 0)


def test_what_a_model_refuses_says_which_worker_it_was() -> None:
    scene = Scene()
    future, actor = scene.ask(1), scene.actors[0]
    said = {"kind": "RunError", "message": "ONNX Runtime cannot run net", "hint": None}
    for outcome in scene.exchange.answered(0, actor, actor.calls[0][0], [(None, said, 1)])[0]:
        outcome.tell()
    with pytest.raises(RunError, match=r"^node/cpu/0: ONNX Runtime cannot run net$"):
        future.result(0)


@pytest.mark.parametrize(
    ("rows", "are_views"), [((5000,), (True,)), ((5000, 5000, 20_000), (False, False, True))]
)
def test_an_answer_keeps_no_more_than_twice_its_bytes_of_what_came_with_it(
    rows: tuple[int, ...], are_views: tuple[bool, ...]
) -> None:
    scene = Scene()
    scene.ask(0)
    scene.answer(0)
    scene.ask(0)
    scene.ask(0)  # those that come now travel together
    futures, actor = [scene.ask(x) for x in range(len(rows))], scene.actors[0]
    scene.answer(0)
    scene.answer(0)
    ((call, _),) = actor.calls
    outputs = [np.ones((1, count), np.float32) for count in rows]
    results: list[Any] = [([output], None, 1) for output in outputs]
    for outcome in scene.exchange.answered(0, actor, call, results)[0]:
        outcome.tell()
    found = [np.shares_memory(f.result(0)["y"], o) for f, o in zip(futures, outputs, strict=True)]
    assert tuple(found) == are_views
