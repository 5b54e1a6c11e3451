"""When a pool over a cluster gives up a node, a worker, a wait or itself, and when it does not."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from pipeline.cluster import RaySessionPool
from pipeline.cluster.serving.hands import Life, read_connection
from pipeline.cluster.serving.packing import Call
from pipeline.cluster.serving.posts import Wanted, plan_posts
from pipeline.cluster.serving.scouting import list_nodes
from pipeline.errors import PoolClosedError, PoolError, RunError
from pipeline.runtime.pool.crew import WorkerEvent
from pipeline.runtime.tensors import write_tensors
from tests.cluster.serving.conftest import batch, eventually
from tests.cluster.serving.slow_models import ENDLESS, slow_batch, write_slow
from tests.cluster.small_cluster import SmallCluster
from tests.runtime.pool.pool_bundles import write_doubling, write_passing_on

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning:ray", "ignore:.*fork:DeprecationWarning"
)

ONE = np.ones((1, 1), np.float32)


def kill_only_worker(pool: RaySessionPool) -> None:
    pid = pool.stats().workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_a_node_with_another_build_does_not_join(
    nodes: SmallCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_doubling(tmp_path / "net")
    with RaySessionPool(folder, max_nodes=1, poll_s=0.1) as pool:
        shutil.rmtree(folder)
        write_passing_on(folder, "float32", ONE)
        with caplog.at_level(logging.WARNING):
            pool.scale(None)
            eventually(lambda: "has another build in the place of net" in caplog.text, within_s=20)
        assert len(pool.nodes) == len(pool.stats().workers) == 1
        assert float(pool.run(batch(3))["y"][0, 0]) == 6.0


def test_a_check_ends_with_its_pool(nodes: SmallCluster, tmp_path: Path) -> None:
    pool = RaySessionPool(write_slow(tmp_path / "slow"), max_nodes=1)
    said: list[BaseException] = []

    def check() -> None:
        try:
            pool.check()
        except PoolError as error:
            said.append(error)

    pool.submit(slow_batch(0, ENDLESS))
    thread = threading.Thread(target=check)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    pool.close(drain=False)
    thread.join(10)
    assert [type(error) for error in said] == [PoolClosedError]
    with pytest.raises(PoolClosedError):
        pool.check()


def test_a_pool_does_not_outlive_its_connection_though_there_is_another(
    nodes: SmallCluster, bundle: Path
) -> None:
    connection = read_connection()
    with RaySessionPool(bundle, max_nodes=1) as pool:
        pool.run(batch())
        ray.shutdown()
        nodes.connect()
        with pytest.raises(ray.exceptions.RaySystemError, match="shut down, and initialised again since"):
            connection.require()
        with pytest.raises(PoolError):
            pool.run(batch())
        eventually(lambda: pool.stats().workers[0].state == "stopped", within_s=10)
        with pytest.raises(PoolClosedError, match="Ray was shut down"):
            pool.run(batch())


def test_a_fork_of_the_process_has_a_closed_pool(nodes: SmallCluster, bundle: Path) -> None:
    with RaySessionPool(bundle, max_nodes=1) as pool:
        context = multiprocessing.get_context("fork")
        said: Any = context.SimpleQueue()

        def child() -> None:
            calls: list[Callable[[], Any]] = [
                lambda: pool.run(batch()),
                lambda: pool.run(batch(1, 100_000)),
                lambda: pool.check(),
                lambda: pool.wait_ready(),
                lambda: pool.close(),
                lambda: pool.stats().workers,
            ]
            for call in calls:
                try:
                    said.put(call())
                except PoolError as error:
                    said.put(f"{type(error).__name__}: {error}")

        process = context.Process(target=child)
        process.start()
        process.join(15)
        assert process.exitcode == 0
        closed = "PoolClosedError: a pool cannot be used in a fork of its process"
        assert [said.get() for _ in range(6)] == [closed] * 4 + [None, ()]
        assert float(pool.run(batch(2))["y"][0, 0]) == 4.0


def test_requests_wait_for_the_node_that_takes_the_place_of_one_given_up(
    nodes: SmallCluster, bundle: Path
) -> None:
    with RaySessionPool(bundle, max_nodes=1, max_restarts=0, grace_s=0.3, poll_s=0.1) as pool:
        (first,) = pool.nodes
        kill_only_worker(pool)
        eventually(lambda: pool.stats().is_degraded, within_s=10)
        assert float(pool.run(batch(4), timeout_s=30)["y"][0, 0]) == 8.0
        assert first not in pool.nodes


def test_a_node_that_is_let_go_and_taken_up_again_gets_its_workers_once(
    nodes: SmallCluster, bundle: Path
) -> None:
    with RaySessionPool(bundle, max_nodes=1, poll_s=0.02, cpus_per_worker=0.25) as pool:

        def uses(count: int) -> bool:
            return len(pool.nodes) == count

        for most in (2, 1, 2, 1, 2):
            pool.scale(most)
            eventually(partial(uses, most), within_s=10)
        pool.wait_ready(2, timeout_s=30)
        names = [worker.name for worker in pool.stats().workers]
        assert len(names) == len(set(names)) == 2


def test_a_worker_that_refuses_one_request_after_the_other_is_checked(
    nodes: SmallCluster, tmp_path: Path
) -> None:
    folder, two = write_doubling(tmp_path / "net"), np.ones((2, 2), np.float32)
    said: list[WorkerEvent] = []
    with RaySessionPool(folder, max_nodes=1, digests="off", max_restarts=0, observer=said.append) as pool:
        name = pool.stats().workers[0].name
        write_tensors(folder / "golden.npz", {"input:x": two, "output:y": two})
        for _ in range(15):
            with pytest.raises(RunError, match=f"^{name}: ONNX Runtime cannot run net"):
                pool.run({"x": np.ones((1, 2, 3), np.float32)})
        assert {event.state for event in said} == {"starting", "ready"}
        with pytest.raises(RunError):
            pool.run({"x": np.ones((1, 2, 3), np.float32)})
        eventually(lambda: any("does not answer as recorded" in str(e.error) for e in said), within_s=10)


def test_a_bundle_that_is_away_for_a_while_costs_no_worker(nodes: SmallCluster, tmp_path: Path) -> None:
    folder = write_doubling(tmp_path / "net")
    with RaySessionPool(folder, max_nodes=1, max_restarts=100) as pool:
        folder.rename(tmp_path / "away")
        kill_only_worker(pool)
        eventually(lambda: "no bundle there" in str(pool.stats().workers[0].error), within_s=20)
        (tmp_path / "away").rename(folder)
        assert float(pool.run(batch(4), timeout_s=30)["y"][0, 0]) == 8.0


def test_a_cluster_without_room_is_no_crash_and_said_in_time(nodes: SmallCluster, bundle: Path) -> None:
    with pytest.raises(PoolError, match=r"too few workers\n  expected 5, got nodes with devices for 2"):
        RaySessionPool(bundle, min_ready=5)

    class Guest:
        def greet(self) -> None:
            """Says nothing."""

    guest_class: Any = ray.remote(num_cpus=1)(Guest)
    guests = [guest_class.remote() for _ in nodes.nodes]
    try:
        ray.get([guest.greet.remote() for guest in guests])
        with pytest.raises(PoolError, match=r"has no room for .*\n  expected 1 CPUs free within 4 s"):
            RaySessionPool(bundle, start_timeout_s=4)
    finally:
        for guest in guests:
            ray.kill(guest)


class Interrupting:
    """What a signal's handler interrupts the sending of."""

    def __reduce__(self) -> str:
        raise KeyboardInterrupt


def test_a_call_whose_sending_is_interrupted_is_answered(nodes: SmallCluster) -> None:
    answers: list[BaseException] = []
    node = next(node for node in list_nodes() if node.cpus)
    (post,) = plan_posts(node, Wanted(), memory_bytes=None)
    life = Life("worker", post, read_connection(), lambda _, __, future: answers.append(future.exception()))
    try:
        with pytest.raises(KeyboardInterrupt):
            life.send(Call((1,)), [("net", [Interrupting()])])
        assert [type(answer) for answer in answers] == [KeyboardInterrupt]
    finally:
        life.kill()
