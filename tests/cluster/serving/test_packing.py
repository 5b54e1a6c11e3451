"""Requests travel together only where they do not wait for each other long."""

from __future__ import annotations

from collections import deque

from pipeline.cluster.serving.packing import CALLS_AT_A_TIME, Parcel, pack_call
from pipeline.runtime.pool.ledger import depth_for
from tests.cluster.serving.test_exchange import Scene

SLOW_NS, SHORT_NS = 100_000_000, 1000


def lengths(scene: Scene) -> list[int]:
    return [len(values) for _, values in scene.actors[0].calls]


def test_all_that_a_worker_of_long_runs_is_given_fits_into_its_calls() -> None:
    assert depth_for(None) == depth_for(SLOW_NS / 1e9) == CALLS_AT_A_TIME
    waiting = deque(Parcel(number, 4) for number in range(CALLS_AT_A_TIME))
    calls = [pack_call(waiting, most=16) for _ in range(CALLS_AT_A_TIME)]
    assert [call and call.numbers for call in calls] == [(number,) for number in range(CALLS_AT_A_TIME)]


def test_long_runs_never_share_a_call_however_they_come() -> None:
    scene = Scene()
    futures = [scene.ask(x) for x in range(20)]
    # Both are answered before the actor is seen to be free, so that two requests come at once.
    scene.answer(0, which=1, nanoseconds=SLOW_NS)
    assert lengths(scene) == [1]
    while scene.actors[0].calls:
        assert set(lengths(scene)) == {1}
        scene.answer(0, which=len(scene.actors[0].calls) - 1, nanoseconds=SLOW_NS)
    assert all(future.done() for future in futures)


def test_short_runs_share_calls() -> None:
    scene = Scene()
    scene.ask(0)
    scene.answer(0, nanoseconds=SHORT_NS)
    for x in range(12):
        scene.ask(x)
    scene.answer(0, nanoseconds=SHORT_NS)
    assert lengths(scene) == [1, 10]
