from __future__ import annotations

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
    return {path.name for path in Path("/dev/shm").glob("ortprep-*")}


def workers() -> set[int]:
    """Every worker of every pool: fresh processes, and forks of a forkserver."""
    processes = {int(path.name): path for path in Path("/proc").glob("[0-9]*")}
    commands, parents = {}, {}
    for pid, path in processes.items():
        with suppress(OSError):
            parents[pid] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            commands[pid] = (path / "cmdline").read_bytes()
    forked = {pid for pid, command in commands.items() if b"multiprocessing.forkserver" in command}
    fresh = {pid for pid, command in commands.items() if b"pool.process import enter" in command}
    return fresh | {pid for pid in forked if parents[pid] in forked}


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
