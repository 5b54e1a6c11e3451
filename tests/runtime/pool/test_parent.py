"""However the program that has a pool ends, nothing of the pool is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.runtime.pool.process import StartMethod
from pipeline.runtime.pool.segments import process_namespace, start_ticks, sweep_segments
from tests.runtime.pool.conftest import segments

pytestmark = pytest.mark.runtime

_PROGRAM = """\
import os, sys, time
import numpy as np
from pipeline.errors import PoolClosedError
from pipeline.runtime import SessionPool

if __name__ == "__main__":
    bundle, method, worker, ending = sys.argv[1:]
    pool = SessionPool(bundle, devices="cpu", workers_per_device=2, start_method=method, worker=worker)
    x = pool.empty("x", (64, 1024))
    x[...] = 1
    kept = pool.run({"x": x})["y"]
    if ending == "hang":
        x[...] = -103
        futures = [pool.submit({"x": x}) for _ in range(2)]
    print(*(w.pid for w in pool.stats().workers), flush=True)
    if ending in ("sleep", "hang"):
        time.sleep(60)
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
BAD = "tests.runtime.pool.bad_workers:goes_wrong_when_asked"


def start(tmp_path: Path, bundle: Path, method: str, ending: str) -> tuple[subprocess.Popen[str], list[int]]:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    root = str(Path(__file__).parents[3])
    process = subprocess.Popen(
        [sys.executable, str(program), str(bundle), method, BAD, ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, [int(word) for word in line.split()]


def is_gone(pids: list[int], before: set[str]) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not any(start_ticks(pid) for pid in pids if not _is_zombie(pid)) and segments() <= before:
            return True
        time.sleep(0.02)
    return False


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("ending", ["sleep", "hang"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_program_leaves_nothing(
    tmp_path: Path, bundle: Path, method: StartMethod, number: signal.Signals, ending: str
) -> None:
    before = segments()
    process, pids = start(tmp_path, bundle, method, ending)
    assert len(pids) == 2
    assert segments() > before
    process.send_signal(number)
    process.communicate(timeout=30)
    assert is_gone(pids, before)


@pytest.mark.parametrize(("ending", "code"), [("end", 0), ("raise", 1), ("fork", 0)])
def test_a_program_that_never_closes_its_pool_ends_all_the_same(
    tmp_path: Path, bundle: Path, method: StartMethod, ending: str, code: int
) -> None:
    before = segments()
    process, pids = start(tmp_path, bundle, method, ending)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        out, err = process.stdout.read(), process.stderr.read()
    process.wait(30)
    assert process.returncode == code, err
    assert ("end 2.0" in out) == (ending != "raise")
    assert "leaked" not in err
    assert is_gone(pids, before)


def test_what_a_power_cut_of_all_processes_leaves_the_next_pool_removes() -> None:
    here, pid = process_namespace(), os.getpid()
    names = {
        f"ortprep-{here}-{pid}-1-0123abcd-1": False,
        f"ortprep-{here}-{pid}-{start_ticks(pid)}-0123abcd-1": True,
        f"ortprep-{here + 1}-{pid}-1-0123abcd-1": True,
        "ortprep-notes-of-somebody": True,
    }
    paths = [Path("/dev/shm") / name for name in names]
    for path in paths:
        path.touch()
    try:
        sweep_segments()
        assert {path.name: path.exists() for path in paths} == names
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
