"""A signal's handler that raises leaves no lock held and nothing lost."""

import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ortprep.runtime import PoolConfig, SessionPool
from tests.fakes import is_alive, wait_for
from tests.runtime.pool.conftest import batch

pytestmark = [pytest.mark.slow, pytest.mark.runtime]
PATIENCE_S = 60


class InterruptError(BaseException):
    """What a handler raises."""


class Storm:
    """Sends this process a signal every `interval_s`, whose handler disarms itself and raises if it is armed.

    So nothing is raised where no one expects it: in what catches the one before, or in pytest.
    """

    def __init__(self, interval_s):
        self.is_armed = False
        self._interval_s = interval_s

    def __enter__(self):
        self._before = signal.signal(signal.SIGALRM, self._strike)
        signal.setitimer(signal.ITIMER_REAL, self._interval_s, self._interval_s)
        return self

    def __exit__(self, *_):
        self.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _strike(self, *_):
        if self.is_armed:
            self.is_armed = False
            raise InterruptError


def run_large(pool):
    pool.run({"x": np.ones((30, 1024), np.float32)})


def run_small(pool):
    pool.run(batch(), timeout_s=PATIENCE_S)


def weather(bundle, duration_s, interval_s):
    """Makes calls in a storm of signals until the time is up."""
    seen = {"signals": 0, "calls": 0}
    end, turns = time.monotonic() + duration_s, itertools.cycle((run_large, run_small))
    with SessionPool(bundle, PoolConfig(devices="cpu", threads=1)) as pool:
        with Storm(interval_s) as storm:
            while time.monotonic() < end:
                try:
                    storm.is_armed = True
                    next(turns)(pool)
                    storm.is_armed = False
                    seen["calls"] += 1
                except InterruptError:
                    seen["signals"] += 1
        wait_for(functools.partial(has_none_pending, pool), what="no request is left")
        assert pool.stats().workers[0].restarts == 0
        assert (pool.run(batch())["y"] == 2 * batch()["x"]).all()
    return seen


def has_none_pending(pool):
    return pool.stats().pending == 0


def test_a_storm_of_signals_loses_no_request_and_holds_no_lock(bundle):
    # In a process of its own: here the signals would strike what pytest's plugins have the collector call.
    code = "import sys, pathlib; from tests.runtime.pool.test_signals import weather; "
    code += "print(weather(pathlib.Path(sys.argv[1]), 4.0, 0.001)['signals'])"
    command = [sys.executable, "-c", code, str(bundle)]
    root = str(Path(__file__).parents[3])
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10


# -- however the program that has a pool ends, nothing of the pool is left

_PROGRAM = """\
import dataclasses, os, sys, threading, time
import numpy as np
from ortprep.errors import PoolClosedError
from ortprep.runtime import PoolConfig, SessionPool

if __name__ == "__main__":
    bundle, worker, ending, threads = sys.argv[1:]
    config = PoolConfig(devices="cpu", workers_per_device=2, worker=worker, threads=int(threads))
    if ending == "fork early":
        pool = SessionPool(bundle, dataclasses.replace(config, min_ready=0))
        time.sleep(0.05)  # the template loads the model
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(3600)
    else:
        pool = SessionPool(bundle, config)
    x = np.ones((64, 1024), np.float32)
    kept = pool.run({"x": x})["y"]
    if ending == "hang":
        x[...] = -105
        for _ in range(2):
            threading.Thread(target=pool.run, args=({"x": x},), daemon=True).start()
        time.sleep(0.5)
    print(*(w.pid for w in pool.stats().workers), flush=True)
    if ending in ("sleep", "hang", "fork early"):
        time.sleep(3600)
    if ending == "fork":
        threading.Thread(target=pool.run, args=({"x": x},)).start()
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
    if ending == "destructor":
        class Last:
            def __init__(self):
                self.pool, self.write, self.closed = pool, os.write, PoolClosedError
            def __del__(self):
                try:
                    self.pool.run({"x": x})
                except self.closed:
                    self.write(1, b"refused\\n")
                self.pool.close()
        last = Last()
    if ending == "raise":
        raise RuntimeError("the program failed")
    print("end", float(kept[0, 0]), flush=True)
"""
BAD = "tests.runtime.pool.fakes:goes_wrong_when_asked"


def start(tmp_path, bundle, ending, threads=1):
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
    line = process.stdout.readline()
    return process, [int(word) for word in line.split()]


def wait_until_gone(pids):
    wait_for(lambda: not any(map(is_alive, pids)), what="workers end")


@pytest.mark.parametrize(
    ("number", "ending", "threads"),
    [
        (signal.SIGKILL, "sleep", 1),
        (signal.SIGKILL, "hang", 2),
        (signal.SIGTERM, "hang", 1),
        (signal.SIGINT, "sleep", 2),
    ],
)
def test_a_killed_program_leaves_nothing(tmp_path, bundle, number, ending, threads):
    process, pids = start(tmp_path, bundle, ending, threads)
    assert len(pids) == 2
    process.send_signal(number)
    process.communicate(timeout=300)
    wait_until_gone(pids)


@pytest.mark.attack
def test_a_fork_made_while_workers_start_keeps_none_of_them(tmp_path, bundle):
    process, pids = start(tmp_path, bundle, "fork early")
    assert len(pids) == 2
    process.kill()
    try:
        wait_until_gone(pids)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the fork
        process.communicate()


@pytest.mark.parametrize(("ending", "code"), [("end", 0), ("raise", 1), ("fork", 0), ("destructor", 0)])
def test_a_program_that_never_closes_its_pool_ends_all_the_same(tmp_path, bundle, ending, code):
    process, pids = start(tmp_path, bundle, ending)
    with process.stdout, process.stderr:
        out, err = process.stdout.read(), process.stderr.read()
    process.wait(300)
    assert process.returncode == code, err
    assert ("end 2.0" in out) == (ending != "raise")
    assert out.count("refused") == (1 if ending == "destructor" else 0)
    assert "leaked" not in err
    wait_until_gone(pids)
