"""Actors and nodes are lost, and join, while requests are in flight."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import ray

from pipeline.cluster import RaySessionPool
from pipeline.errors import (
    BundleError,
    LoadError,
    PipelineError,
    PoolClosedError,
    PoolError,
    WorkerDiedError,
)
from pipeline.runtime.element_types import Array
from pipeline.runtime.pool.crew import WorkerEvent
from pipeline.runtime.tensors import write_tensors
from tests.cluster.serving.conftest import batch, eventually
from tests.cluster.serving.slow_models import ENDLESS, slow_batch, write_slow
from tests.cluster.small_cluster import SmallCluster
from tests.runtime.pool.pool_bundles import write_doubling, write_passing_on

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray")


ONE = np.ones((1, 1), np.float32)


def kill(pool: RaySessionPool) -> str:
    """Kills the process of a worker that has one, as soon as one has; returns the worker's name."""
    killed: list[str] = []

    def kill_one() -> bool:
        name, pid = next(((one.name, one.pid) for one in pool.stats().workers if one.pid), ("", None))
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # an earlier death, which nobody noticed yet
                os.kill(pid, signal.SIGKILL)
                killed.append(name)
        return bool(killed)

    eventually(kill_one, within_s=30)
    return killed[0]


def firsts(futures: Sequence[Future[dict[str, Array]]]) -> list[float | WorkerDiedError]:
    """What came of requests: the first element of the answer, or the error."""
    found: list[float | WorkerDiedError] = []
    for future in futures:
        try:
            found.append(float(future.result(60)["y"][0, 0]))
        except WorkerDiedError as error:
            found.append(error)
    return found


def test_a_closed_pool_says_so(nodes: SmallCluster, bundle: Path) -> None:
    pool = RaySessionPool(bundle, max_nodes=1)
    futures = [pool.submit(batch(n)) for n in range(50)]
    pool.close()
    assert [float(future.result(0)["y"][0, 0]) for future in futures] == [2.0 * n for n in range(50)]
    with pytest.raises(PoolClosedError):
        pool.run(batch())


def test_what_may_be_tried_again_is_answered_when_actors_are_killed(
    nodes: SmallCluster, bundle: Path
) -> None:
    with RaySessionPool(bundle, max_restarts=100) as pool:
        futures = []
        for n in range(900):
            futures.append(pool.submit(batch(n), retries=50, timeout_s=60))
            if n % 300 == 150:
                kill(pool)
        assert firsts(futures) == [2.0 * n for n in range(900)]
        assert sum(worker.restarts for worker in pool.stats().workers) >= 1


def test_what_an_actor_died_of_fails_with_its_name_and_nothing_else_does(
    nodes: SmallCluster, tmp_path: Path
) -> None:
    slow = write_slow(tmp_path / "slow")
    with RaySessionPool(slow, max_batch=1) as pool:
        futures = [pool.submit(slow_batch(n)) for n in range(8)]
        eventually(lambda: all(worker.in_flight for worker in pool.stats().workers), within_s=10)
        time.sleep(0.1)
        name = kill(pool)
        came = firsts(futures)
        errors = [error for error in came if isinstance(error, WorkerDiedError)]
        assert len(errors) == 1
        assert str(errors[0]).startswith(f"{name} died")
        assert errors[0].pid
        assert [one for one in came if not isinstance(one, WorkerDiedError)] == [
            float(n) for n in range(8) if not isinstance(came[n], WorkerDiedError)
        ]


def test_a_node_that_is_killed_loses_nothing_that_may_be_tried_again(
    nodes: SmallCluster, tmp_path: Path
) -> None:
    slow = write_slow(tmp_path / "slow")
    with RaySessionPool(slow) as pool:
        first = pool.stats().workers[0]
        node = nodes.node_of(first.name)
        futures = [pool.submit(slow_batch(n), retries=3 if n % 2 else 0) for n in range(12)]
        eventually(lambda: all(worker.in_flight for worker in pool.stats().workers), within_s=10)
        nodes.kill_node(node)
        came = firsts(futures)
        for n in range(12):
            if isinstance(came[n], WorkerDiedError):
                assert n % 2 == 0
                assert str(came[n]).startswith(f"{first.name} died")
            else:
                assert came[n] == float(n)
        eventually(lambda: len(pool.nodes) == 1, within_s=20)
        assert [worker.state for worker in pool.stats().workers] == ["ready"]


def test_a_node_that_joins_takes_requests_that_are_in_flight(nodes: SmallCluster, tmp_path: Path) -> None:
    slow = write_slow(tmp_path / "slow")
    with RaySessionPool(slow, max_nodes=1, poll_s=0.2) as pool:
        futures = [pool.submit(slow_batch(n)) for n in range(8)]
        assert len(pool.stats().workers) == 1
        pool.scale(None)
        until = time.monotonic() + 60
        # Always some in flight, however long the node takes.
        while min(served(pool), default=0) == 0 or len(served(pool)) < 2:
            assert time.monotonic() < until
            if sum(not future.done() for future in futures) < 8:
                futures.append(pool.submit(slow_batch(len(futures))))
            time.sleep(0.01)
        assert firsts(futures) == [float(n) for n in range(len(futures))]
        assert sum(served(pool)) == len(futures)


def served(pool: RaySessionPool) -> list[int]:
    return [worker.served for worker in pool.stats().workers]


def test_a_node_that_is_let_go_first_answers_what_it_has(nodes: SmallCluster, tmp_path: Path) -> None:
    slow = write_slow(tmp_path / "slow")
    with RaySessionPool(slow, poll_s=0.2) as pool:
        futures = [pool.submit(slow_batch(n)) for n in range(12)]
        pool.scale(1)
        eventually(lambda: len(pool.stats().workers) == 1, within_s=20)
        assert firsts(futures) == [float(n) for n in range(12)]


def test_a_worker_that_hangs_is_ended_and_replaced(nodes: SmallCluster, tmp_path: Path) -> None:
    slow = write_slow(tmp_path / "slow")
    with RaySessionPool(slow, max_nodes=1, run_timeout_s=1.0) as pool:
        hanging = pool.submit(slow_batch(0, ENDLESS))
        with pytest.raises(WorkerDiedError, match="it was at a request for more than 1 s"):
            hanging.result(30)
        assert float(pool.run(slow_batch(3, 2))["y"][0, 0]) == 3.0


def test_requests_wait_for_a_node_when_the_last_one_is_lost(nodes: SmallCluster, bundle: Path) -> None:
    lone = nodes.add_node(labels={"pool": "lone"})
    with RaySessionPool(bundle, labels={"pool": "lone"}, grace_s=60) as pool:
        assert len(pool.nodes) == 1
        nodes.kill_node(lone)
        eventually(lambda: not pool.nodes, within_s=20)
        waiting = pool.submit(batch(4), retries=1)
        joined = nodes.add_node(labels={"pool": "lone"})
        assert float(waiting.result(30)["y"][0, 0]) == 8.0
    nodes.kill_node(joined)


def test_a_pool_that_has_no_node_left_says_so_after_its_grace(nodes: SmallCluster, bundle: Path) -> None:
    lone = nodes.add_node(labels={"pool": "alone"})
    with RaySessionPool(bundle, labels={"pool": "alone"}, grace_s=0.5) as pool:
        nodes.kill_node(lone)
        eventually(lambda: not pool.nodes, within_s=20)
        with pytest.raises(PoolError, match=r"no worker is left for doubling[\s\S]*its node"):
            pool.run(batch())


def test_a_model_whose_only_node_is_lost_goes_to_another(nodes: SmallCluster, tmp_path: Path) -> None:
    bundles = {
        "one": write_doubling(tmp_path / "one"),
        "two": write_passing_on(tmp_path / "two", "float32", ONE),
    }
    with RaySessionPool(bundles) as pool:
        served = {worker.models: worker.name for worker in pool.stats().workers}
        assert set(served) == {("one",), ("two",)}
        both = pool.run_all(batch(3, 100_000))
        assert [float(both[name]["y"][0, 0]) for name in ("one", "two")] == [6.0, 3.0]
        nodes.kill_node(nodes.node_of(served["one",]))
        eventually(lambda: len(pool.nodes) == 1, within_s=20)
        assert float(pool.run(batch(4), model="one", retries=1)["y"][0, 0]) == 8.0
        assert float(pool.run(batch(4), model="two", retries=1)["y"][0, 0]) == 4.0
        assert pool.stats().workers[0].variants.keys() == {"one", "two"}


def test_a_node_that_dies_as_a_pool_begins_is_not_waited_for(nodes: SmallCluster, bundle: Path) -> None:
    nodes.kill_node(nodes.nodes[0])
    with RaySessionPool(bundle) as pool:
        assert float(pool.run(batch(4), retries=3)["y"][0, 0]) == 8.0
        eventually(lambda: len(pool.nodes) == 1, within_s=20)
    nodes.add_node()
    nodes.kill_node(nodes.nodes[0])
    with RaySessionPool(bundle, max_nodes=1) as pool:  # on the other, whichever the cluster lists first
        assert float(pool.run(batch(4), retries=3)["y"][0, 0]) == 8.0


def test_a_worker_refuses_a_bundle_that_took_the_place_of_its_own(
    nodes: SmallCluster, tmp_path: Path
) -> None:
    folder = write_doubling(tmp_path / "net")
    said: list[WorkerEvent] = []
    with RaySessionPool(folder, max_nodes=1, observer=said.append, grace_s=0.2) as pool:
        shutil.rmtree(folder)
        write_passing_on(folder, "float32", ONE)
        kill(pool)
        eventually(lambda: said[-1].state == "failed", within_s=30)
        assert "bundle was replaced by another build" in str(said[-1].error)
        assert pool.stats().is_degraded
        with pytest.raises(PoolError, match="no worker is left for net"):
            pool.run(batch())
        with pytest.raises(PipelineError, match="bundle was replaced by another build"):
            pool.wait_ready(timeout_s=5)


def test_a_pool_that_cannot_begin_says_where_and_why(
    nodes: SmallCluster, bundle: Path, tmp_path: Path
) -> None:
    with pytest.raises(PoolError, match=r"bad workers_per_device\n  expected a whole number from 1, got 1.5"):
        RaySessionPool(bundle, workers_per_device=1.5)  # type: ignore[arg-type]
    with pytest.raises(BundleError, match=r"^\d+\.\d+\.\d+\.\d+-[0-9a-f]{8}: "):
        RaySessionPool(tmp_path / "nowhere")
    with pytest.raises(PoolError, match=r"no node for the pool\n.* CPUs or GPUs and labels a=b"):
        RaySessionPool(bundle, labels={"a": "b"})
    with pytest.raises(LoadError, match=r"/cpu/0: bundle was not prepared for target 'cuda'"):
        RaySessionPool(bundle, target="cuda")


def test_a_pool_is_closed_when_the_driver_leaves_the_cluster(nodes: SmallCluster, bundle: Path) -> None:
    try:
        with RaySessionPool(bundle) as pool:
            ray.shutdown()
            with pytest.raises(PoolError, match=r"Ray was shut down|died"):
                pool.run(batch())
            eventually(lambda: not pool.stats().pending, within_s=10)
            with pytest.raises(PoolClosedError, match="Ray was shut down"):
                pool.run(batch(1, 100_000))
        with pytest.raises(PoolError, match="Ray is not initialised"):
            RaySessionPool(bundle)
        assert not ray.is_initialized()
    finally:
        nodes.connect()


def test_a_worker_that_answers_its_sample_wrongly_is_named_and_replaced(
    nodes: SmallCluster, tmp_path: Path
) -> None:
    folder = write_doubling(tmp_path / "net")
    with RaySessionPool(folder, max_nodes=1) as pool:
        name = pool.stats().workers[0].name
        assert pool.check(30) == {}
        write_tensors(folder / "golden.npz", {"input:x": ONE, "output:y": ONE})
        wrong = pool.check(30)
        assert wrong.keys() == {name}
        assert "does not answer as recorded" in wrong[name]
        eventually(lambda: pool.stats().workers[0].state == "failed", within_s=30)
        assert "golden.npz" in str(pool.stats().workers[0].error)
