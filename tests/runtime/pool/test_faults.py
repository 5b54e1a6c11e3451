"""Everything that can go wrong with a worker, no request is ever lost."""

import gc
import itertools
import os
import pickle
import resource
import signal
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from ortprep.errors import PipelineError, PoolError, RequestTimeoutError, RunError, WorkerDiedError
from ortprep.runtime import PoolConfig, SessionPool
from tests.fakes import freeze, wait_for
from tests.runtime.pool import fakes as bad_workers
from tests.runtime.pool.conftest import batch, descriptors, submit

pytestmark = [pytest.mark.slow, pytest.mark.runtime]
MODULE = "tests.runtime.pool.fakes"
BAD = f"{MODULE}:goes_wrong_when_asked"
SOON = {"devices": "cpu", "start_timeout_s": 600}
PATIENCE_S = 300
"""Longer than anything takes on the busiest machine; reached by tests that fail only."""


def is_right(future, first=1):
    return bool((future.result(PATIENCE_S)["y"] == 2 * batch(first)["x"]).all())


def test_a_worker_that_exits_on_its_way_up_is_reported_whole(bundle, capfd):
    with pytest.raises(WorkerDiedError, match="exit code 3") as caught:
        SessionPool(bundle, PoolConfig(**SOON, worker=f"{MODULE}:exits", max_restarts=1))
    assert caught.value.returncode == 3
    assert caught.value.pid > 0
    assert "out of luck" in capfd.readouterr().err
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.returncode, copy.pid) == (3, caught.value.pid)


@pytest.mark.parametrize(
    ("fault", "said", "timeout_s"),
    [
        ("segfaults", "SIGSEGV", 600),
        ("hangs", r"not ready in time(?s:.)*SIGKILL", 1),
        ("babbles", "broke the protocol", 600),
    ],
)
def test_a_worker_that_goes_wrong_on_its_way_up_is_ended(bundle, fault, said, timeout_s):
    worker = f"{MODULE}:{fault}"
    config = PoolConfig(devices="cpu", worker=worker, max_restarts=0, start_timeout_s=timeout_s)
    with pytest.raises(WorkerDiedError, match=said):
        SessionPool(bundle, config)


@pytest.mark.attack
def test_a_worker_that_floods_the_pool_on_its_way_up_is_ended(bundle):
    config = PoolConfig(devices="cpu", start_timeout_s=30, worker=f"{MODULE}:floods", max_restarts=0)
    with SessionPool(bundle, config) as pool:
        futures = [submit(pool, batch()) for _ in range(2)]  # one for each lane
        for future in futures:
            assert "broke the protocol" in str(future.exception(PATIENCE_S))
        wait_for(lambda: pool.stats().is_degraded, what="the worker is given up")
        (worker,) = pool.stats().workers
        assert worker.restarts == 0
        assert worker.start_s is not None, "it never was ready"


@pytest.mark.parametrize(
    ("wish", "code", "said"),
    [
        (bad_workers.EXIT, 7, "exit code 7"),
        (bad_workers.SEGFAULT, -signal.SIGSEGV, ""),
        (bad_workers.RAISE, 1, "exit code 1"),
        (bad_workers.GARBAGE, -signal.SIGKILL, "broke the protocol"),
        (bad_workers.WRONG_TURN, -signal.SIGKILL, "expected an answer to request"),
        (bad_workers.EMPTY, -signal.SIGKILL, "closed its connection"),
    ],
)
def test_a_worker_that_dies_of_a_request_is_replaced(bundle, wish, code, said):
    with SessionPool(bundle, PoolConfig(**SOON, worker=BAD)) as pool:
        first = pool.stats().workers[0].pid
        deadly = submit(pool, batch(wish))
        behind = [submit(pool, batch(n)) for n in range(5)]
        error = deadly.exception(PATIENCE_S)
        assert isinstance(error, WorkerDiedError)
        assert (error.pid, error.returncode) == (first, code)
        assert said in str(error)
        assert all(is_right(future, n) for n, future in enumerate(behind))
        pool.wait_ready()
        wait_for(lambda: pool.stats().workers[0].restarts == 1, what="another process")


@pytest.mark.attack
@pytest.mark.parametrize("wish", [bad_workers.OUTSIDE, bad_workers.FEW, bad_workers.LONG])
def test_an_answer_that_is_none_is_an_error_and_ends_the_worker(bundle, wish):
    with SessionPool(bundle, PoolConfig(**SOON, worker=BAD)) as pool:
        with pytest.raises(WorkerDiedError, match=r"answer|broke the protocol"):
            pool.run(batch(wish))
        assert is_right(submit(pool, batch()))
        assert pool.stats().workers[0].restarts == 1


@pytest.mark.attack
def test_a_deadly_request_is_to_blame_although_another_was_refused_before(bundle):
    with SessionPool(bundle, PoolConfig(**SOON, worker=BAD)) as pool:
        refused = submit(pool, {"x": np.full(3, bad_workers.SLOW, np.float32)})  # runs, while the next waits
        deadly = submit(pool, batch(bad_workers.EXIT))
        assert isinstance(refused.exception(PATIENCE_S), RunError)
        assert isinstance(deadly.exception(PATIENCE_S), WorkerDiedError)
        assert is_right(submit(pool, batch()))
        assert pool.stats().workers[0].restarts == 1


@pytest.mark.attack
def test_a_lane_is_free_again_although_no_thread_could_wait_for_its_late_answer(bundle, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with SessionPool(bundle, PoolConfig(**SOON, worker=BAD)) as pool:
        for _ in range(2):  # lanes
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RequestTimeoutError):
                    pool.run(batch(bad_workers.SLOW), timeout_s=0.1)
        assert is_right(submit(pool, batch()))
        wait_for(lambda: pool.stats().pending == 0, what="no request is left")


def test_a_worker_that_never_begins_a_request_is_ended_and_another_answers(bundle):
    with SessionPool(bundle, PoolConfig(**SOON, run_timeout_s=1)) as pool:
        freeze(pool.stats().workers[0].pid or 0)
        assert is_right(submit(pool, batch()))
        assert pool.stats().workers[0].restarts == 1


@pytest.mark.attack
def test_only_the_request_that_a_worker_had_begun_is_to_blame(bundle):
    with SessionPool(bundle, PoolConfig(**SOON, worker=BAD)) as pool:
        begun = submit(pool, batch(bad_workers.BLOCK))
        wait_for(bundle.with_name("blocked").exists, what="it runs")
        sent = submit(pool, batch(2))
        wait_for(lambda: pool.stats().workers[0].in_flight == 2, what="both lanes are in use")
        os.kill(pool.stats().workers[0].pid or 0, signal.SIGKILL)
        assert isinstance(begun.exception(PATIENCE_S), WorkerDiedError)
        assert is_right(sent, 2)


def test_a_worker_that_answers_twice_is_ended_and_takes_no_more_than_its_request_with_it(bundle):
    with SessionPool(bundle, PoolConfig(**SOON, worker=BAD)) as pool:
        assert pool.run(batch(bad_workers.TWICE))["y"].shape == (0, 1)
        behind = [submit(pool, batch(n)) for n in range(5)]
        failed = [future for future in behind if future.exception(PATIENCE_S) is not None]
        assert failed in ([], behind[:1])
        assert all(is_right(future, n) for n, future in enumerate(behind) if future not in failed)
        wait_for(lambda: pool.stats().workers[0].restarts == 1, what="the worker is replaced")


def test_a_request_may_be_tried_on_another_worker(bundle):
    with SessionPool(bundle, PoolConfig(**SOON, worker=BAD, workers_per_device=2)) as pool:

        def restarts():
            return sum(worker.restarts for worker in pool.stats().workers)

        with pytest.raises(WorkerDiedError):
            pool.run(batch(bad_workers.EXIT), retries=1)
        wait_for(lambda: restarts() == 2, what="both workers die of it")
        pool.wait_ready()
        blocked = submit(pool, batch(bad_workers.BLOCK), retries=1)
        (busy,) = wait_for(
            lambda: [worker.pid or 0 for worker in pool.stats().workers if worker.in_flight], what="it runs"
        )
        os.kill(busy, signal.SIGKILL)
        wait_for(lambda: restarts() == 3, what="its worker dies")
        bad_workers.unblock(bundle)
        assert is_right(blocked, bad_workers.BLOCK)
        assert restarts() == 3


def test_a_worker_that_dies_again_and_again_is_given_up(bundle):
    with SessionPool(bundle, PoolConfig(**SOON, worker=BAD, max_restarts=1)) as pool:
        for _ in range(2):
            with pytest.raises(WorkerDiedError):
                pool.run(batch(bad_workers.EXIT))
        with pytest.raises(PoolError, match="no worker is left for doubling"):
            pool.run(batch())
        assert pool.stats().workers[0].state == "failed"
        assert pool.stats().pending == 0


@contextmanager
def no_descriptors(*, but=0):
    """This process can open so many files meanwhile, as long as it closes no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = (number for number in itertools.count() if number not in open_now)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, but, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_pool_without_descriptors_is_an_error_and_leaves_none(bundle):
    SessionPool(bundle, PoolConfig(**SOON)).close()  # all that is imported, and opened once, is there now
    gc.collect()
    opened, said = descriptors(), set()
    for count in range(1, 12):
        config = PoolConfig(**SOON, max_restarts=0, workers_per_device=4, threads=2)
        with no_descriptors(but=count), pytest.raises(PipelineError) as caught:
            SessionPool(bundle, config)
        said.add(caught.value.message.split("\n")[0].rstrip("0123"))
        del caught
        gc.collect()
        wait_for(lambda: descriptors() <= opened, what="all descriptors are closed")
    assert said == {"cannot make a pool", "cannot start cpu/"}


def test_a_worker_is_started_again_once_there_are_descriptors(bundle):
    with SessionPool(bundle, PoolConfig(**SOON, max_restarts=1000)) as pool:
        (worker,) = pool.stats().workers
        with no_descriptors():
            os.kill(worker.pid or 0, signal.SIGKILL)
            behind = submit(pool, batch(), retries=1)  # which the pool may send before it sees the death
            wait_for(
                lambda: "Too many open files" in str(pool.stats().workers[0].error), what="no descriptor"
            )
        assert is_right(behind)


def test_workers_that_are_killed_all_the_time_lose_nothing(bundle):
    """The storm of `bench.storm`, shorter: every request ends, and every answer is right."""
    threads, each = 8, 250
    with SessionPool(bundle, PoolConfig(**SOON, workers_per_device=2, max_restarts=1000)) as pool:
        wrong = []
        kills = []
        is_over = threading.Event()

        def kill():
            while not is_over.wait(0.1):
                ready = [worker for worker in pool.stats().workers if worker.state == "ready"]
                for worker in ready[:1]:
                    with suppress(ProcessLookupError):
                        os.kill(worker.pid or 0, signal.SIGKILL)
                        kills.append(worker.pid)

        def ask(seed):
            for n in itertools.count():
                if n >= each and (len(kills) >= 3 or wrong):
                    return
                x = np.full((2, 500 + 9 * n), seed * each + n, np.float32)  # answers of 4 to 22 KB
                try:
                    y = pool.run({"x": x}, retries=1000, timeout_s=PATIENCE_S)["y"]
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
