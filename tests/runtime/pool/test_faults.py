"""Everything that can go wrong with a worker, under every way to start one: no request is ever lost."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import (
    LoadError,
    PipelineError,
    PoolError,
    RunError,
    WorkerDiedError,
)
from pipeline.runtime import SessionPool, WorkerEvent
from pipeline.runtime.pool.process import StartMethod
from tests.runtime.pool import bad_workers
from tests.runtime.pool.conftest import batch
from tests.runtime.pool.pool_bundles import write_model_bundle

pytestmark = pytest.mark.runtime
MODULE = "tests.runtime.pool.bad_workers"
BAD = f"{MODULE}:goes_wrong_when_asked"
SOON: dict[str, Any] = {"devices": "cpu", "start_timeout_s": 60}


def is_right(future: Future[Any], first: float = 1) -> bool:
    return bool((future.result(30)["y"] == 2 * batch(first)["x"]).all())


def test_a_worker_that_exits_on_its_way_up_is_reported_whole(bundle: Path, method: StartMethod) -> None:
    with pytest.raises(WorkerDiedError, match="out of luck") as caught:
        SessionPool(bundle, **SOON, worker=f"{MODULE}:exits", start_method=method, max_restarts=1)
    assert caught.value.returncode == 3
    assert caught.value.pid > 0
    assert caught.value.stderr[-1] == "out of luck"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.returncode, copy.pid, copy.stderr) == (3, caught.value.pid, caught.value.stderr)


def test_a_worker_that_segfaults_on_its_way_up_is_reported_by_its_signal(
    bundle: Path, method: StartMethod
) -> None:
    with pytest.raises(WorkerDiedError, match="SIGSEGV") as caught:
        SessionPool(bundle, **SOON, worker=f"{MODULE}:segfaults", start_method=method, max_restarts=0)
    assert caught.value.returncode == -signal.SIGSEGV


def test_a_worker_that_hangs_on_its_way_up_is_ended(bundle: Path, method: StartMethod) -> None:
    with pytest.raises(WorkerDiedError, match=r"not ready in time(?s:.)*SIGKILL"):
        SessionPool(
            bundle,
            devices="cpu",
            start_timeout_s=1,
            worker=f"{MODULE}:hangs",
            start_method=method,
            max_restarts=0,
        )


def test_a_worker_that_writes_garbage_on_its_way_up_is_ended(bundle: Path, method: StartMethod) -> None:
    with pytest.raises(WorkerDiedError, match="unreadable message"):
        SessionPool(bundle, **SOON, worker=f"{MODULE}:babbles", start_method=method, max_restarts=0)


def test_what_load_would_have_raised_arrives_as_it_is(bundle: Path, method: StartMethod) -> None:
    golden = bundle / "golden.npz"
    data = bytearray(golden.read_bytes())
    data[-200] ^= 0xFF
    golden.write_bytes(bytes(data))
    with pytest.raises(PipelineError, match=r"golden\.npz") as caught:
        SessionPool(bundle, **SOON, start_method=method)
    assert type(caught.value).__name__ == "IntegrityError"


def test_a_model_that_answers_wrongly_never_serves(tmp_path: Path) -> None:
    x = np.ones((2, 2), np.float32)
    liar = write_model_bundle(
        tmp_path / "liar",
        {"y": ("Add", ("x", "x"))},
        {"x": ("float32", ("a", "b"))},
        {"y": ("float32", ("a", "b"))},
        {"input:x": x, "output:y": 3 * x},
    )
    with pytest.raises(LoadError, match="does not answer as recorded"):
        SessionPool(liar, **SOON)


def test_one_bad_worker_does_not_hide_the_others(bundle: Path, method: StartMethod) -> None:
    with SessionPool(
        bundle,
        **SOON,
        workers_per_device=2,
        min_ready=1,
        worker=f"{MODULE}:second_of_two_exits",
        max_restarts=0,
        start_method=method,
    ) as pool:
        for n in range(10):
            assert is_right(pool.submit(batch(n)), n)
        with pytest.raises(WorkerDiedError, match="out of luck"):
            pool.wait_ready()
        stats = pool.stats()
        assert sorted(worker.state for worker in stats.workers) == ["failed", "ready"]
        assert stats.is_degraded
        failed = next(worker for worker in stats.workers if worker.state == "failed")
        assert "out of luck" in str(failed.error)


@pytest.mark.parametrize(
    ("wish", "code", "said"),
    [
        (bad_workers.EXIT, 7, "exiting as asked"),
        (bad_workers.SEGFAULT, -signal.SIGSEGV, ""),
        (bad_workers.RAISE, 1, "a bug in the worker"),
        (bad_workers.GARBAGE, -signal.SIGKILL, "unreadable message"),
        (bad_workers.WRONG_TURN, -signal.SIGKILL, "answer to the wrong request"),
    ],
)
def test_a_worker_that_dies_of_a_request_is_replaced(
    bundle: Path, method: StartMethod, wish: int, code: int, said: str
) -> None:
    with SessionPool(bundle, **SOON, worker=BAD, start_method=method) as pool:
        first = pool.stats().workers[0].pid
        deadly = pool.submit(batch(wish))
        behind = [pool.submit(batch(n)) for n in range(5)]
        error = deadly.exception(30)
        assert isinstance(error, WorkerDiedError)
        assert (error.pid, error.returncode) == (first, code)
        assert said in str(error)
        assert all(is_right(future, n) for n, future in enumerate(behind))
        stats = pool.stats().workers[0]
        assert (stats.restarts, stats.state) == (1, "ready")
        assert pool.stats().used_bytes == 0


@pytest.mark.parametrize("wish", [bad_workers.OUTSIDE, bad_workers.FEW])
def test_an_answer_that_is_none_is_an_error_and_ends_the_worker(bundle: Path, wish: int) -> None:
    with SessionPool(bundle, **SOON, worker=BAD) as pool:
        with pytest.raises(PoolError, match="answer"):
            pool.run(batch(wish))
        assert is_right(pool.submit(batch()))
        assert pool.stats().workers[0].restarts == 1


def test_a_worker_that_hangs_is_ended_and_replaced(bundle: Path, method: StartMethod) -> None:
    with SessionPool(bundle, **SOON, worker=BAD, run_timeout_s=1.5, start_method=method) as pool:
        with pytest.raises(WorkerDiedError, match=r"one request for too long(?s:.)*SIGKILL"):
            pool.run(batch(bad_workers.HANG))
        assert is_right(pool.submit(batch()))


def test_a_worker_that_reads_nothing_for_long_misses_nothing(bundle: Path) -> None:
    with SessionPool(bundle, **SOON, worker=BAD, max_shared_bytes=2**20) as pool:
        slow = pool.submit(batch(bad_workers.SLOW))
        for n in range(1500):  # each makes a segment go, of which the worker is told: more than a pipe holds
            pool.empty("x", (1, 140_000 + n % 2 * 60_000))
        assert is_right(slow, bad_workers.SLOW)
        assert is_right(pool.submit(batch()))
        assert pool.stats().workers[0].restarts == 0


def test_what_onnxruntime_refuses_to_bind_is_a_request_s_error_and_no_death(bundle: Path) -> None:
    with SessionPool(bundle, **SOON, worker=f"{MODULE}:cannot_bind") as pool:
        large = batch(1, 100_000)
        pool.run(large)  # until its answer's shapes are known, nothing is bound
        with pytest.raises(RunError, match=r"cannot run doubling\n  RuntimeError: no room to bind to"):
            pool.run(large)
        assert (pool.run(batch(2))["y"] == 2 * batch(2)["x"]).all()
        assert [worker.restarts for worker in pool.stats().workers] == [0]


def test_a_greedy_worker_is_refused_and_goes_on(bundle: Path) -> None:
    with SessionPool(bundle, **SOON, worker=BAD) as pool:
        assert is_right(pool.submit(batch(bad_workers.GREEDY)), bad_workers.GREEDY)
        assert pool.stats().workers[0].restarts == 0


def test_a_request_may_be_tried_on_another_worker(bundle: Path) -> None:
    events: list[WorkerEvent] = []
    with SessionPool(
        bundle, **SOON, worker=BAD, workers_per_device=2, run_timeout_s=30, observer=events.append
    ) as pool:
        with pytest.raises(WorkerDiedError):
            pool.run(batch(bad_workers.EXIT), retries=1)
        assert len([event for event in events if event.error is not None]) == 2
        pool.wait_ready()
        slow = pool.submit(batch(bad_workers.SLOW), retries=1)
        time.sleep(0.1)
        (busy,) = (worker.pid for worker in pool.stats().workers if worker.in_flight)
        assert busy is not None
        os.kill(busy, signal.SIGKILL)
        assert is_right(slow, bad_workers.SLOW)
        assert len([event for event in events if event.error is not None]) == 3


def test_a_worker_that_dies_again_and_again_is_given_up(bundle: Path, method: StartMethod) -> None:
    with SessionPool(bundle, **SOON, worker=BAD, max_restarts=1, start_method=method) as pool:
        for _ in range(2):
            with pytest.raises(WorkerDiedError):
                pool.run(batch(bad_workers.EXIT))
        with pytest.raises(PoolError, match="no worker is left for doubling"):
            pool.run(batch())
        with pytest.raises(PoolError, match="no worker is left"):
            pool.empty("x", (1, 1))
        assert pool.stats().workers[0].state == "failed"
        assert pool.stats().pending == 0


def test_what_waits_for_a_worker_that_is_given_up_is_told(bundle: Path) -> None:
    with SessionPool(bundle, **SOON, worker=BAD, max_restarts=0) as pool:
        pool.submit(batch(bad_workers.SLOW))  # so that all of them wait before the worker comes to the first
        futures = [pool.submit(batch(bad_workers.EXIT)), *(pool.submit(batch(n)) for n in range(20))]
        errors = [future.exception(30) for future in futures]
        assert isinstance(errors[0], WorkerDiedError)
        assert all("no worker is left" in str(error) for error in errors[1:])


def test_a_worker_that_begins_to_answer_wrongly_is_found_and_replaced(bundle: Path) -> None:
    with SessionPool(bundle, **SOON, worker=f"{MODULE}:answers_wrongly_when_told") as pool:
        assert pool.check(timeout_s=30) == {}
        bundle.with_name("wrong").touch()
        assert pool.check(timeout_s=30) == {"cpu/0": "y: expected 2.0, got 3.0"}
        assert is_right(pool.submit(batch()))
        assert pool.stats().workers[0].restarts == 1
        assert pool.check(timeout_s=30) == {}


def test_close_ends_a_worker_that_does_not_listen(bundle: Path, method: StartMethod) -> None:
    pool = SessionPool(bundle, **SOON, worker=BAD, start_method=method)
    future = pool.submit(batch(bad_workers.HANG))
    begun = time.monotonic()
    pool.close(timeout_s=0.2)
    assert time.monotonic() - begun < 8
    assert future.exception(0) is not None


def test_workers_that_are_killed_all_the_time_lose_nothing(bundle: Path, method: StartMethod) -> None:
    """The million of `bench.pool`, shorter: every request ends, and every answer is right."""
    threads, each = 8, 250
    with SessionPool(bundle, **SOON, workers_per_device=2, max_restarts=1000, start_method=method) as pool:
        wrong: list[object] = []
        kills: list[object] = []
        is_over = threading.Event()

        def kill() -> None:
            while not is_over.wait(0.1):
                ready = [worker for worker in pool.stats().workers if worker.state == "ready"]
                for worker in ready[:1]:
                    with suppress(ProcessLookupError):
                        os.kill(worker.pid or 0, signal.SIGKILL)
                        kills.append(worker.pid)

        def ask(seed: int) -> None:
            for n in itertools.count():
                if n >= each and (len(kills) >= 3 or wrong):
                    return
                x = np.full((2, 500), seed * each + n, np.float32)
                try:
                    y = pool.run({"x": x}, retries=10, timeout_s=60)["y"]
                except PipelineError as error:
                    wrong.append(error)
                    continue
                if not (y == 2 * x).all():
                    wrong.append((seed, n))

        killer = threading.Thread(target=kill)
        killer.start()
        askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(threads)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        is_over.set()
        killer.join()
        assert wrong == []
        assert len(kills) >= 3
        assert pool.stats().used_bytes == 0


def test_a_pool_that_waits_for_nobody_serves_as_soon_as_it_can(bundle: Path) -> None:
    with SessionPool(bundle, **SOON, min_ready=0) as pool:
        pool.wait_ready(1)
        assert is_right(pool.submit(batch()))
