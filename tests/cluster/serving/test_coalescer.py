"""Requests that wait travel together; callers get their own answers, whatever becomes of a call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from ray import exceptions
from ray.serve.exceptions import BackPressureError

from ortprep.cluster.serving.coalescer import SMALL_BYTES, RequestCoalescer
from ortprep.errors import (
    InvalidRequestError,
    PoolClosedError,
    PoolError,
    RequestTimeoutError,
    RunError,
    WorkerDiedError,
    to_dict,
)
from ortprep.runtime.pool.admission import RequestOptions, WouldBlock
from ortprep.runtime.pool.base_pool import BasePool
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature
from tests.fakes import wait_for

F4 = np.dtype(np.float32)
SIGNATURES = {"double": Signature("double", {"x": F4}, {"y": F4})}
CLOSED = PoolClosedError("pool is closed")


class Deployment:
    """Doubles what it is asked, once a test lets it."""

    def __init__(self) -> None:
        self.calls: list[list[float]] = []
        self.open = threading.Event()
        self.failures: list[BaseException] = []
        self.run_ns = 1000
        self.active = self.max_active = 0

    async def run_many(self, requests: Sequence[tuple[str, str, Sequence[Array]]]) -> list[Any]:
        self.calls.append([float(x[0]) for _, _, (x,) in requests])
        failure = self.failures.pop(0) if self.failures else None
        self.active += 1
        self.max_active = max(self.max_active, self.active)
        while not self.open.is_set():
            await asyncio.sleep(0.001)
        self.active -= 1
        if failure is not None:
            raise failure
        return [self.answer(x) for _, _, (x,) in requests]

    def answer(self, x: Array) -> Any:
        if x[0] < 0:
            return None, to_dict(RunError("negative")), self.run_ns
        return [2 * x], None, self.run_ns


@pytest.fixture
def deployment() -> Deployment:
    return Deployment()


@pytest.fixture
def coalescer(deployment: Deployment) -> Iterator[RequestCoalescer]:
    made = RequestCoalescer(SIGNATURES, deployment.run_many, max_pending=20, max_batch=8)
    deployment.open.set()
    made.run("double", {"x": np.zeros(1, np.float32)}, RequestOptions())  # from now on runs are timed
    deployment.calls.clear()
    deployment.open.clear()
    yield made
    made.close(CLOSED, drain=False)


def ask(coalescer: RequestCoalescer, first: float, size: int = 1, **options: Any) -> Any:
    x = np.full(size, first, np.float32)
    return coalescer.submit("double", {"x": x}, RequestOptions(**options))


def settle(deployment: Deployment, calls: int) -> None:
    wait_for(lambda: len(deployment.calls) >= calls, what=f"{calls} calls are made")
    assert len(deployment.calls) == calls


def test_what_comes_while_calls_are_away_travels_together(
    coalescer: RequestCoalescer, deployment: Deployment
) -> None:
    futures = []
    for n in range(20):
        futures.append(ask(coalescer, n))
        settle(deployment, min(n + 1, 2))
    deployment.open.set()
    assert [float(future.result(300)["y"][0]) for future in futures] == [2.0 * n for n in range(20)]
    assert deployment.calls[:2] == [[0], [1]]
    assert max(map(len, deployment.calls)) == 8
    assert [number for call in deployment.calls for number in call] == list(range(20))
    assert (coalescer.counts.served, coalescer.counts.calls) == (21, 1 + len(deployment.calls))


def test_more_replicas_have_more_calls_at_a_time(coalescer: RequestCoalescer, deployment: Deployment) -> None:
    coalescer.replicas = 3
    futures = []
    for n in range(20):
        futures.append(ask(coalescer, n))
        settle(deployment, min(n + 1, 6))
    deployment.open.set()
    assert [float(future.result(300)["y"][0]) for future in futures] == [2.0 * n for n in range(20)]
    assert deployment.max_active == 6


def test_large_requests_and_long_runs_travel_alone(
    coalescer: RequestCoalescer, deployment: Deployment
) -> None:
    deployment.run_ns = 50_000_000
    sizes = [1, 1, SMALL_BYTES, 1, 1]
    futures = []
    for n, size in enumerate(sizes):
        futures.append(ask(coalescer, n, size))
        settle(deployment, min(n + 1, 2))
    deployment.open.set()
    for future in futures:
        future.result(300)
    assert [2] in deployment.calls
    for n in range(6):
        futures.append(ask(coalescer, n))
    for future in futures:
        future.result(300)
    assert all(len(call) == 1 for call in deployment.calls[-6:])


def died() -> exceptions.ActorDiedError:
    return exceptions.ActorDiedError()


@pytest.mark.parametrize(
    "loss", [died(), exceptions.ActorUnavailableError("gone", None), asyncio.CancelledError()]
)
def test_only_what_asked_for_a_retry_is_tried_again(
    coalescer: RequestCoalescer, deployment: Deployment, loss: BaseException
) -> None:
    deployment.failures = [RunError("first"), RunError("second"), loss]
    blockers = []
    for n in range(2):
        blockers.append(ask(coalescer, -10 - n))
        settle(deployment, n + 1)
    futures = [ask(coalescer, n, retries=n % 2) for n in range(6)]
    deployment.open.set()
    for blocker in blockers:
        with pytest.raises(PoolError):
            blocker.result(300)
    for n, future in enumerate(futures):
        if n % 2:
            assert future.result(300)["y"][0] == 2 * n
        else:
            with pytest.raises(WorkerDiedError, match="a replica died"):
                future.result(300)
    assert sorted(deployment.calls[3:]) == [[1], [3], [5]]
    assert coalescer.counts.retried == 3


def test_a_request_that_kills_every_replica_fails_in_the_end(
    coalescer: RequestCoalescer, deployment: Deployment
) -> None:
    deployment.failures = [died() for _ in range(3)]
    deployment.open.set()
    with pytest.raises(WorkerDiedError):
        ask(coalescer, 1, retries=2).result(300)
    assert len(deployment.calls) == 3


def test_a_deployment_that_is_overloaded_is_asked_again(
    coalescer: RequestCoalescer, deployment: Deployment
) -> None:
    deployment.failures = [BackPressureError(1, 1), BackPressureError(1, 1)]
    deployment.open.set()
    assert ask(coalescer, 4).result(300)["y"][0] == 8


def test_what_a_model_refuses_fails_alone(coalescer: RequestCoalescer, deployment: Deployment) -> None:
    deployment.open.set()
    futures = [ask(coalescer, n) for n in (1, -1, 2)]
    assert [futures[at].result(300)["y"][0] for at in (0, 2)] == [2, 4]
    with pytest.raises(RunError, match="negative"):
        futures[1].result(300)


def test_an_answer_with_other_outputs_is_an_error_and_holds_nothing_up(
    coalescer: RequestCoalescer, deployment: Deployment
) -> None:
    deployment.answer = lambda x: ([x, x], None, 1)  # type: ignore[method-assign]
    deployment.open.set()
    futures = [ask(coalescer, n) for n in range(5)]
    for future in futures:
        with pytest.raises(PoolError, match="call failed"):
            future.result(300)
    assert coalescer.pending == 0
    del deployment.answer
    assert ask(coalescer, 7).result(300)["y"][0] == 14


def test_pending_requests_are_bounded(coalescer: RequestCoalescer, deployment: Deployment) -> None:
    futures = [ask(coalescer, n) for n in range(20)]
    with pytest.raises(WouldBlock):
        ask(coalescer, 20, may_wait=False)
    with pytest.raises(RequestTimeoutError, match="did not get its turn"):
        ask(coalescer, 20, timeout_s=0.05)
    deployment.open.set()
    assert ask(coalescer, 20).result(300)["y"][0] == 40
    assert [future.result(300)["y"][0] for future in futures] == [2 * n for n in range(20)]


def test_a_deadline_ends_a_wait_wherever_the_request_is(
    coalescer: RequestCoalescer, deployment: Deployment
) -> None:
    futures = [ask(coalescer, n, timeout_s=0.1) for n in range(6)]
    for future in futures:
        with pytest.raises(RequestTimeoutError, match="took too long"):
            future.result(300)
    assert coalescer.pending == 0
    deployment.open.set()
    assert ask(coalescer, 7).result(300)["y"][0] == 14


def test_only_what_no_replica_has_can_be_cancelled(
    coalescer: RequestCoalescer, deployment: Deployment
) -> None:
    futures = []
    for n in range(4):
        futures.append(ask(coalescer, n))
        settle(deployment, min(n + 1, 2))
    assert [future.cancel() for future in futures] == [False, False, True, True]
    deployment.open.set()
    assert [future.result(300)["y"][0] for future in futures[:2]] == [0, 2]
    assert coalescer.pending == 0


def test_a_closed_pool_drains_or_fails_what_it_has(deployment: Deployment) -> None:
    for drain in (True, False):
        made = RequestCoalescer(SIGNATURES, deployment.run_many, max_pending=20, max_batch=8)
        futures = [ask(made, n) for n in range(5)]
        if drain:
            threading.Timer(0.05, deployment.open.set).start()
        made.close(CLOSED, drain=drain)
        assert [future.done() for future in futures] == [True] * 5
        assert all((future.exception() is None) == drain for future in futures)
        with pytest.raises(PoolClosedError):
            ask(made, 1)
        deployment.open.clear()


def test_a_callback_must_not_wait_for_its_own_pool(
    coalescer: RequestCoalescer, deployment: Deployment
) -> None:
    said: list[BaseException] = []
    futures = [ask(coalescer, n) for n in range(20)]

    def again(_: object) -> None:
        try:
            while True:
                ask(coalescer, 1)
        except PoolError as error:
            said.append(error)

    futures[0].add_done_callback(again)
    deployment.open.set()
    for future in futures:
        future.result(300)
    assert "wait for its own pool" in str(said[0])


class Calls(BasePool):
    """The calls of a pool, without a cluster."""

    def _count_workers(self, model: str | None = None) -> int:
        return 2

    def _share(self, model: str, name: str, value: Any, timeout_s: float | None) -> Any:
        return value


def test_inputs_are_checked_and_copied_when_they_are_handed_over(
    coalescer: RequestCoalescer, deployment: Deployment
) -> None:
    calls, x = Calls(SIGNATURES, coalescer), np.full(3, 5, ">f4")
    future = calls.submit({"x": x})
    x[...] = 0
    deployment.open.set()
    answer: Mapping[str, Array] = future.result(300)
    assert answer["y"].tolist() == [10] * 3
    answer["y"][...] = 0
    with pytest.raises(InvalidRequestError, match="expected float32"):
        calls.submit({"x": np.ones(1)})


def test_asyncio_waits_without_a_thread_of_its_own(
    coalescer: RequestCoalescer, deployment: Deployment
) -> None:
    calls = Calls(SIGNATURES, coalescer)
    deployment.open.set()

    async def ask_many() -> list[float]:
        answers = await asyncio.gather(*(calls.arun({"x": np.full(1, n, np.float32)}) for n in range(50)))
        return [float(answer["y"][0]) for answer in answers]

    assert asyncio.run(ask_many()) == [2.0 * n for n in range(50)]
