"""A pool over the nodes of a real cluster answers as one on a single machine does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.cluster import RaySessionPool
from pipeline.errors import InvalidRequestError, PoolError, RequestTimeoutError, RunError
from pipeline.runtime import SessionPool
from tests.cluster.serving.conftest import batch
from tests.cluster.small_cluster import SmallCluster

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray")


@pytest.fixture(scope="module")
def pool(cluster: SmallCluster, bundle: Path) -> Iterator[RaySessionPool]:
    with RaySessionPool(bundle, max_pending=64) as made:
        yield made


def test_every_node_has_a_worker_that_is_named_after_it(pool: RaySessionPool, cluster: SmallCluster) -> None:
    workers = pool.stats().workers
    assert len(workers) == len(cluster.nodes) == len({worker.pid for worker in workers})
    assert {worker.name.rpartition("/cpu/")[0] for worker in workers} == set(pool.nodes)
    assert {worker.state for worker in workers} == {"ready"}


def test_the_answers_are_those_of_a_pool_on_one_machine(pool: RaySessionPool, bundle: Path) -> None:
    with SessionPool(bundle, devices="cpu") as local:
        for size in (1, 4, 300_000):
            here, there = local.run(batch(3, size)), pool.run(batch(3, size))
            assert here.keys() == there.keys()
            assert here["y"].dtype == there["y"].dtype
            assert here["y"].tobytes() == there["y"].tobytes()


def test_requests_are_answered_in_whatever_way_they_are_made(pool: RaySessionPool) -> None:
    expected = 2 * batch(5)["x"]
    assert (pool.submit(batch(5)).result(30)["y"] == expected).all()
    assert (asyncio.run(pool.arun(batch(5)))["y"] == expected).all()
    firsts = [float(answer["y"][0, 0]) for answer in pool.map(batch(n) for n in range(100))]
    assert firsts == [2.0 * n for n in range(100)]
    unordered = {float(a["y"][0, 0]) for a in pool.map((batch(n) for n in range(50)), ordered=False)}
    assert unordered == {2.0 * n for n in range(50)}
    rows = np.arange(60, dtype=np.float32).reshape(15, 4)
    assert (pool.run_split({"x": rows})["y"] == 2 * rows).all()


def test_both_workers_take_their_share(pool: RaySessionPool) -> None:
    before = [worker.served for worker in pool.stats().workers]
    for future in [pool.submit(batch(n)) for n in range(64)]:
        future.result(30)
    served = [w.served - was for w, was in zip(pool.stats().workers, before, strict=True)]
    assert sum(served) == 64
    assert min(served) > 10


def test_inputs_are_taken_when_they_are_handed_over(pool: RaySessionPool) -> None:
    futures = []
    for size in (4, 100_000):
        given = batch(7, size)
        for _ in range(20):
            futures.append((pool.submit(given), size))
        given["x"][...] = -1
    for future, size in futures:
        assert (future.result(30)["y"] == 2 * batch(7, size)["x"]).all()


def test_an_array_may_be_of_any_layout_and_byte_order(pool: RaySessionPool) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for same in (x.astype(">f4"), np.asfortranarray(x), x[::-1][::-1], x.tolist() and x):
        assert (pool.run({"x": same})["y"] == 2 * x).all()


def test_small_answers_and_copies_can_be_written_to(pool: RaySessionPool) -> None:
    pool.run(batch())["y"][...] = 0
    pool.run(batch(1, 100_000), copy=True)["y"][...] = 0
    assert not pool.run(batch(1, 100_000))["y"].flags.writeable


@pytest.mark.parametrize(
    ("inputs", "message"),
    [({}, "missing x"), ({"x": np.ones((1, 2))}, "expected float32, got float64"), ({"z": 1}, "unknown z")],
)
def test_inputs_that_are_not_the_models_are_refused(
    pool: RaySessionPool, inputs: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        pool.run(inputs)


def test_what_onnx_runtime_refuses_fails_alone(pool: RaySessionPool) -> None:
    wrong = pool.submit({"x": np.ones((1, 2, 3), np.float32)})
    right = [pool.submit(batch(n)) for n in range(10)]
    with pytest.raises(RunError, match="ONNX Runtime cannot run doubling"):
        wrong.result(30)
    assert [float(future.result(30)["y"][0, 0]) for future in right] == [2.0 * n for n in range(10)]
    assert {worker.restarts for worker in pool.stats().workers} == {0}


def test_a_deadline_that_passes_is_an_error(pool: RaySessionPool) -> None:
    with pytest.raises(RequestTimeoutError):
        pool.run(batch(), timeout_s=0.0)
    assert (pool.run(batch())["y"] == 2 * batch()["x"]).all()


def test_a_callback_that_would_wait_for_its_own_pool_is_refused(pool: RaySessionPool) -> None:
    said: list[BaseException] = []

    def ask(_: object) -> None:
        try:
            pool.run(batch())
        except PoolError as error:
            said.append(error)

    future = pool.submit(batch())
    future.add_done_callback(ask)
    pool.submit(batch()).result(30)
    pool.submit(batch()).result(30)
    # Whether it ran in time on the pool's thread, or here since the answer had come already, is chance.
    assert not said or "wait for its own pool" in str(said[0])


def test_golden_samples_are_answered_again(pool: RaySessionPool) -> None:
    assert pool.check(60) == {}
