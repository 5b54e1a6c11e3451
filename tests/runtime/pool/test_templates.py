"""Workers on one thread are forked from a template, and are as good as those that start by themselves."""

import ctypes
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ortprep.errors import IntegrityError, PoolError, WorkerDiedError
from ortprep.runtime import PoolConfig, SessionPool
from ortprep.runtime.pool import template as template_module
from tests.fakes import wait_for
from tests.runtime.pool import fakes as bad_workers
from tests.runtime.pool.conftest import batch, parent_of, start_ticks, submit

pytestmark = [pytest.mark.slow, pytest.mark.runtime]
MODULE = "tests.runtime.pool.fakes"
PATIENCE_S = 300


def open_pool(bundle, workers=2, **settings):
    config = {"devices": "cpu", "threads": 1, "workers_per_device": workers, **settings}
    return SessionPool(bundle, PoolConfig(**config))


def pids(pool):
    return [worker.pid or 0 for worker in pool.stats().workers]


def template_of(pool):
    """Returns the one process that all workers were forked by."""
    (template,) = {parent_of(pid) for pid in pids(pool)}
    assert template != os.getpid()
    return template


def is_right(pool, value=1):
    y = pool.run(batch(value), retries=9, timeout_s=PATIENCE_S)["y"]
    return bool((y == 2 * batch(value)["x"]).all())


def wait_until_back(pool, restarts):
    wait_for(
        lambda: (
            [worker.state for worker in pool.stats().workers] == ["ready"] * len(pool.stats().workers)
            and sum(worker.restarts for worker in pool.stats().workers) == restarts
        ),
        what="workers are back",
    )


def test_a_killed_worker_is_forked_again_and_its_exit_is_known(bundle):
    with open_pool(bundle, worker=f"{MODULE}:goes_wrong_when_asked") as pool:
        template = template_of(pool)
        for number, (wish, code) in enumerate([(bad_workers.EXIT, 7), (bad_workers.SEGFAULT, -11)], 1):
            with pytest.raises(WorkerDiedError) as caught:
                pool.run(batch(wish))
            assert caught.value.returncode == code
            wait_until_back(pool, number)
            assert template_of(pool) == template
            assert is_right(pool, number)


def test_workers_outlive_their_template_and_are_forked_from_the_next_one(bundle):
    with open_pool(bundle) as pool:
        template, workers = template_of(pool), pids(pool)
        os.kill(template, signal.SIGKILL)
        assert all(is_right(pool, n) for n in range(20))
        assert pids(pool) == workers
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        assert is_right(pool)
        wait_until_back(pool, 2)
        assert template_of(pool) != template


def test_a_template_that_does_not_answer_is_replaced(bundle, monkeypatch):
    monkeypatch.setattr(template_module, "_ASK_TIMEOUT_S", 0.5)
    with open_pool(bundle, workers=1) as pool:
        template = template_of(pool)
        os.kill(template, signal.SIGSTOP)
        os.kill(pids(pool)[0], signal.SIGKILL)
        assert is_right(pool)
        assert template_of(pool) != template


@pytest.mark.attack
@pytest.mark.parametrize("lie", ["pool", "init", "none", "huge"])
def test_a_template_that_names_another_process_is_ended_and_that_one_is_not(bundle, monkeypatch, lie):
    monkeypatch.setenv("LIE", lie)
    with pytest.raises(PoolError, match=r"cannot find what template|impossible numbers"):
        open_pool(bundle, worker=f"{MODULE}:lies_about_forks", max_restarts=0, start_timeout_s=60)


@pytest.mark.attack
def test_a_template_that_lies_about_ends_is_replaced(bundle):
    with open_pool(bundle, worker=f"{MODULE}:lies_about_ends") as pool:
        template, killed = template_of(pool), pids(pool)[0]
        os.kill(killed, signal.SIGKILL)
        wait_until_back(pool, 1)
        assert is_right(pool)
        wait_for(lambda: not start_ticks(template), what="the template is ended")


@pytest.fixture
def subreaper():
    """Makes this process the parent of orphans, as the first process of a container is."""
    prctl, pr_set_child_subreaper = ctypes.CDLL(None).prctl, 36
    assert prctl(pr_set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    prctl(pr_set_child_subreaper, 0, 0, 0, 0)


@pytest.mark.usefixtures("subreaper")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_worker_that_ends_after_its_template_stays_a_zombie(bundle, number):
    with open_pool(bundle) as pool:
        for count in range(1, 4):
            template, ended = template_of(pool), pids(pool)
            ticks = {pid: start_ticks(pid) for pid in (template, *ended)}
            os.kill(template, number)
            for pid in ended:
                os.kill(pid, signal.SIGKILL)
            wait_until_back(pool, 2 * count)
            wait_for(lambda ticks=ticks: not still_there(ticks), what="no zombie is left")
            assert is_right(pool, count)


def still_there(ticks):
    """Returns the processes that have not been reaped, given when each was started."""
    return [pid for pid, begun in ticks.items() if start_ticks(pid) == begun]


def opened_by(pid):
    """Returns the sockets and pipes that a process has open."""
    links = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}  # noqa: PTH115 - no path
    return {link for link in links if link.startswith(("socket:", "pipe:"))}


def find_shared(processes):
    """Returns what more than one of these processes has open."""
    counts = Counter(link for pid in processes for link in opened_by(pid))
    return {link for link, count in counts.items() if count > 1}


@pytest.mark.attack
def test_no_worker_has_a_descriptor_of_another_or_of_its_template(bundle):
    with open_pool(bundle, workers=3) as pool:
        template = template_of(pool)
        standard = {os.readlink(f"/proc/{template}/fd/{number}") for number in range(3)}  # noqa: PTH115
        for _ in range(2):
            # A template closes its copies after a fork, maybe later than the worker is ready.
            assert wait_for(
                lambda: find_shared((*pids(pool), template)) <= standard,
                what="no shared descriptors",
                timeout_s=30,
            )
            os.kill(pids(pool)[0], signal.SIGKILL)
            wait_until_back(pool, 1)


def test_models_that_cannot_be_inherited_are_opened_by_each_worker(bundle):
    with open_pool(bundle, worker=f"{MODULE}:cannot_be_forked") as pool:
        assert is_right(pool)
        assert {parent_of(pid) for pid in pids(pool)} == {os.getpid()}
        assert not pool.stats().is_degraded


def test_what_a_template_cannot_load_is_raised_as_load_does(bundle):
    golden = bundle / "golden.npz"
    golden.write_bytes(golden.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError, match=r"golden\.npz"):
        open_pool(bundle)


def test_workers_with_threads_or_own_options_start_by_themselves(bundle):
    for settings in ({"threads": 2}, {"session_options": {"intra_op_num_threads": 1}}):
        with open_pool(bundle, **settings) as pool:
            assert {parent_of(pid) for pid in pids(pool)} == {os.getpid()}
            assert is_right(pool)


@pytest.mark.parametrize("own", [None, "glibc.malloc.hugetlb=0"])
def test_workers_ask_for_huge_pages_unless_the_application_decides(bundle, monkeypatch, own):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    with open_pool(bundle, workers=1) as pool:
        variables = Path(f"/proc/{template_of(pool)}/environ").read_text().split("\0")
    assert f"GLIBC_TUNABLES={own or 'glibc.malloc.hugetlb=1'}" in variables


def test_large_answers_of_forked_workers_are_their_own(bundle):
    with open_pool(bundle) as pool:
        futures = [submit(pool, {"x": np.full((300, 1000), n, np.float32)}) for n in range(40)]
        assert all((future.result(PATIENCE_S)["y"] == 2 * n).all() for n, future in enumerate(futures))
        ended = [template_of(pool), *pids(pool)]
        ticks = {pid: start_ticks(pid) for pid in ended}
    assert not still_there(ticks)
