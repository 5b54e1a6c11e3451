"""However the program that has a pool ends, nothing of the pool is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import wait_for
from tests.runtime.pool.conftest import start_ticks

pytestmark = [pytest.mark.slow, pytest.mark.runtime]

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


@pytest.mark.parametrize("threads", [1, 2], ids=["forked", "started"])
@pytest.mark.parametrize("ending", ["sleep", "hang"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_program_leaves_nothing(tmp_path, bundle, number, ending, threads):
    process, pids = start(tmp_path, bundle, ending, threads)
    assert len(pids) == 2
    process.send_signal(number)
    process.communicate(timeout=300)
    wait_until_gone(pids)


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
