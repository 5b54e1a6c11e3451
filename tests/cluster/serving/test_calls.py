"""What `PoolCalls` adds to requests: an event loop that neither waits nor leaves requests behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pipeline.cluster.serving.packing import SMALL_BYTES
from pipeline.runtime.element_types import Array
from pipeline.runtime.pool.calls import PoolCalls
from pipeline.runtime.pool.futures import Answer, PoolFuture
from pipeline.runtime.pool.gate import Order
from tests.cluster.serving.test_exchange import Scene


class Entrance:
    """The exchange of a scene, which knows the threads that requests are handed in on."""

    def __init__(self, scene: Scene) -> None:
        self.exchange = scene.exchange
        self.threads: list[threading.Thread] = []

    def submit(self, model: str, inputs: Mapping[str, Any], order: Order) -> PoolFuture:
        self.threads.append(threading.current_thread())
        return self.exchange.submit(model, inputs, order)

    def run(self, model: str, inputs: Mapping[str, Any], order: Order) -> Answer:
        return self.exchange.run(model, inputs, order)

    def empty(self, model: str, name: str, shape: tuple[int, ...], order: Order) -> Array:
        return self.exchange.empty(model, name, shape, order)


class Calls(PoolCalls):
    """Calls to one worker, which shares nothing."""

    def _count_workers(self, model: str | None = None) -> int:
        return 1

    def _share(self, model: str, name: str, value: Any, timeout_s: float | None) -> Any:
        return value


def make_calls(scene: Scene) -> tuple[PoolCalls, Entrance]:
    entrance = Entrance(scene)
    return Calls(scene.exchange.signatures, entrance, long_copy_bytes=SMALL_BYTES), entrance


def batch(size: int = 1) -> dict[str, Any]:
    return {"x": np.full((1, size), 7, np.float32)}


@pytest.mark.parametrize("room_comes_first", [True, False])
def test_a_request_cancelled_while_it_waits_for_room_is_never_answered(*, room_comes_first: bool) -> None:
    scene = Scene(max_pending=3)
    calls, entrance = make_calls(scene)
    ahead = [scene.ask(x) for x in range(3)]

    async def give_up() -> None:
        waiting = asyncio.create_task(calls.arun(batch()))
        while len(entrance.threads) < 2:  # once without waiting, once on a thread
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        if room_comes_first:
            with scene.exchange.changed:  # the thread cannot go on before it was given up
                scene.answer(0, nanoseconds=10**8)
                waiting.cancel()
                await asyncio.sleep(0)
        else:
            waiting.cancel()
            await asyncio.sleep(0)
            scene.answer(0, nanoseconds=10**8)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())  # waits for the thread
    assert scene.exchange.counts == (2, 0)
    scene.answer_all()
    assert all(future.done() for future in ahead)
    assert scene.exchange.counts == (0, 0)


def test_who_gave_up_waiting_for_room_waits_no_more_than_until_the_next_change() -> None:
    scene = Scene(max_pending=1)
    calls, entrance = make_calls(scene)
    scene.ask(0)

    async def give_up() -> None:
        waiting = asyncio.create_task(calls.arun(batch(), timeout_s=60))
        while len(entrance.threads) < 2:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with scene.exchange.changed:
            scene.exchange.changed.notify_all()

    begun = time.monotonic()
    asyncio.run(give_up())  # waits for the thread
    assert time.monotonic() - begun < 10
    assert scene.exchange.counts == (1, 0)


def test_a_request_cancelled_behind_others_is_taken_back() -> None:
    scene = Scene()
    calls, _ = make_calls(scene)
    for x in range(2):
        scene.ask(x)

    async def give_up() -> None:
        waiting = asyncio.create_task(calls.arun(batch()))
        await asyncio.sleep(0)
        assert scene.exchange.counts == (3, 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    assert scene.exchange.counts == (2, 0)


@pytest.mark.parametrize(("size", "is_on_loop"), [(SMALL_BYTES // 4, True), (SMALL_BYTES // 4 + 1, False)])
def test_what_takes_long_to_copy_is_not_copied_on_the_event_loop(size: int, *, is_on_loop: bool) -> None:
    scene = Scene()
    calls, entrance = make_calls(scene)

    async def ask() -> Answer:
        task = asyncio.create_task(calls.arun(batch(size)))
        while not scene.actors[0].calls:
            await asyncio.sleep(0.001)
        scene.answer(0)
        return await task

    assert asyncio.run(ask())["y"] == 14
    assert [thread is threading.main_thread() for thread in entrance.threads] == [is_on_loop]
