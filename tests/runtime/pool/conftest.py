from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from pipeline.runtime.element_types import Array
from pipeline.runtime.pool.process import StartMethod
from tests.runtime.pool.pool_bundles import write_doubling


@pytest.fixture(params=get_args(StartMethod))
def method(request: pytest.FixtureRequest) -> StartMethod:
    chosen: StartMethod = request.param
    return chosen


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_doubling(tmp_path / "doubling")


def batch(first: float = 1, size: int = 4) -> dict[str, Array]:
    x = np.arange(size, dtype=np.float32).reshape(1, size)
    x[0, 0] = first
    return {"x": x}


def segments() -> set[str]:
    """Every segment, but for those of programs that run beside these tests: a name has its owner's pid."""
    names = {path.name for path in Path("/dev/shm").glob("ortprep-*")}
    return {name for name in names if not _is_of_a_stranger(int(name.split("-")[2]))}


def _is_of_a_stranger(pid: int) -> bool:
    """Says whether a process is alive, not begun by this one, and not left behind by whoever began it."""
    parent = _parent_of(pid)
    if parent <= 1:
        return False
    while pid > 1:
        if pid == os.getpid():
            return False
        pid = _parent_of(pid)
    return True


def _parent_of(pid: int) -> int:
    """Returns the process that began another, 0 where that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def workers() -> set[int]:
    """Every worker of every pool, but for strangers': fresh processes, and forks of a forkserver."""
    processes = {int(path.name): path for path in Path("/proc").glob("[0-9]*")}
    commands, parents = {}, {}
    for pid, path in processes.items():
        with suppress(OSError):
            parents[pid] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            commands[pid] = (path / "cmdline").read_bytes()
    forked = {pid for pid, command in commands.items() if b"multiprocessing.forkserver" in command}
    fresh = {pid for pid, command in commands.items() if b"pool.process import enter" in command}
    found = fresh | {pid for pid in forked if parents[pid] in forked}
    return {pid for pid in found if not _is_of_a_stranger(pid)}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No worker and no shared memory outlives a test."""
    before, others = segments(), workers()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    yield
    until = time.monotonic() + 5
    while (segments() - before or workers() - others) and time.monotonic() < until:
        time.sleep(0.01)
    assert segments() - before == set()
    assert workers() - others == set()
    # The forkserver, once started, keeps some of its own.
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 8
