"""A signal's handler that raises leaves no lock held and nothing lost."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortprep.runtime import PoolConfig, SessionPool
from tests.fakes import wait_for
from tests.runtime.pool.conftest import batch, start_ticks

PATIENCE_S = 60


class InterruptError(BaseException):
    """What a handler raises."""


@contextmanager
def storm(interval_s: float) -> Iterator[None]:
    """Sends this process a signal again and again, whose handler raises."""

    def strike(*_: object) -> None:
        raise InterruptError

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
        yield
    finally:
        for _ in range(1000):  # the next one may come before the last is stopped
            with suppress(InterruptError):
                signal.signal(signal.SIGALRM, lambda *_: None)
                signal.setitimer(signal.ITIMER_REAL, 0)
                break
        signal.signal(signal.SIGALRM, before)


def run_large(pool, futures):
    pool.run({"x": np.ones((30, 1024), np.float32)})


def submit_and_cancel(pool: SessionPool, futures: list[Future[Any]]) -> None:
    futures.extend(pool.submit(batch(n)) for n in range(4))
    futures[-1].cancel()


def submit_and_wait(pool: SessionPool, futures: list[Future[Any]]) -> None:
    futures.append(pool.submit(batch(1, 100_000)))
    futures[-1].result(PATIENCE_S)


def run_small(pool: SessionPool, futures: list[Future[Any]]) -> None:
    pool.run(batch(), timeout_s=PATIENCE_S)


CALLS = [run_large, submit_and_cancel, submit_and_wait, run_small]


def weather(bundle: Path, duration_s: float, interval_s: float) -> dict[str, int]:
    """Makes calls in a storm of signals until the time is up."""
    seen = {"signals": 0, "calls": 0}
    end, turns = time.monotonic() + duration_s, itertools.count()
    futures: list[Future[Any]] = []
    with SessionPool(bundle, PoolConfig(devices="cpu", max_pending=8, threads=1)) as pool:
        while time.monotonic() < end:
            try:
                with storm(interval_s):
                    while time.monotonic() < end:
                        CALLS[next(turns) % len(CALLS)](pool, futures)
                        seen["calls"] += 1
            except InterruptError:
                seen["signals"] += 1
            except RuntimeError as error:  # of CPython: the signal came in `Condition.wait`
                if str(error) != "cannot release un-acquired lock":
                    raise
                seen["signals"] += 1
        for future in futures:
            wait_for(future.done, what="a request ends")
        wait_for(functools.partial(has_none_pending, pool), what="no request is left")
        assert pool.stats().workers[0].restarts == 0
        assert (pool.run(batch())["y"] == 2 * batch()["x"]).all()
    return seen


def has_none_pending(pool: SessionPool) -> bool:
    return pool.stats().pending == 0


@pytest.mark.slow
@pytest.mark.runtime
def test_a_storm_of_signals_loses_no_request_and_holds_no_lock(bundle):
    assert weather(bundle, 4.0, 0.001)["signals"] > 10


# -- however the program that has a pool ends, nothing of the pool is left

_PROGRAM = """\
import os, sys, time
import numpy as np
from ortprep.errors import PoolClosedError
from ortprep.runtime import PoolConfig, SessionPool

if __name__ == "__main__":
    bundle, worker, ending, threads = sys.argv[1:]
    config = PoolConfig(devices="cpu", workers_per_device=2, worker=worker, threads=int(threads))
    pool = SessionPool(bundle, config)
    x = np.ones((64, 1024), np.float32)
    kept = pool.run({"x": x})["y"]
    if ending == "hang":
        x[...] = -105
        futures = [pool.submit({"x": x}) for _ in range(2)]
    print(*(w.pid for w in pool.stats().workers), flush=True)
    if ending in ("sleep", "hang"):
        time.sleep(3600)
    if ending == "fork":
        pending = pool.submit({"x": x})
        child = os.fork()
        if child == 0:
            try:
                pool.run({"x": x})
            except PoolClosedError:
                pool.close()
                sys.exit(17)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        assert (pool.run({"x": x})["y"] == 2).all()
    if ending == "raise":
        raise RuntimeError("the program failed")
    print("end", float(kept[0, 0]), flush=True)
"""
BAD = "tests.runtime.pool.fakes:goes_wrong_when_asked"


def start(
    tmp_path: Path, bundle: Path, ending: str, threads: int = 1
) -> tuple[subprocess.Popen[str], list[int]]:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    root = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        [sys.executable, str(program), str(bundle), BAD, ending, str(threads)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, [int(word) for word in line.split()]


def wait_until_gone(pids: list[int]) -> None:
    wait_for(lambda: not any(start_ticks(pid) for pid in pids if not _is_zombie(pid)), what="workers end")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.runtime
@pytest.mark.parametrize("threads", [1, 2], ids=["forked", "started"])
@pytest.mark.parametrize("ending", ["sleep", "hang"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_program_leaves_nothing(tmp_path, bundle, number, ending, threads):
    process, pids = start(tmp_path, bundle, ending, threads)
    assert len(pids) == 2
    process.send_signal(number)
    process.communicate(timeout=300)
    wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.runtime
@pytest.mark.parametrize(("ending", "code"), [("end", 0), ("raise", 1), ("fork", 0)])
def test_a_program_that_never_closes_its_pool_ends_all_the_same(tmp_path, bundle, ending, code):
    process, pids = start(tmp_path, bundle, ending)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        out, err = process.stdout.read(), process.stderr.read()
    process.wait(300)
    assert process.returncode == code, err
    assert ("end 2.0" in out) == (ending != "raise")
    assert "leaked" not in err
    wait_until_gone(pids)
