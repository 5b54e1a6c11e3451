from __future__ import annotations

import gc
import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortprep.runtime import SessionPool
from ortprep.runtime.tensors.element_types import Array
from tests.fakes import stat_of, wait_for
from tests.runtime.pool.builders import write_doubling


@pytest.fixture
def bundle(tmp_path):
    return write_doubling(tmp_path / "doubling")


def batch(first: float = 1, size: int = 4) -> dict[str, Array]:
    x = np.arange(size, dtype=np.float32).reshape(1, size)
    x[0, 0] = first
    return {"x": x}


def submit(pool: SessionPool, inputs: dict[str, Array], **options: Any) -> Future[dict[str, Array]]:
    """Runs a request on a thread of its own, and returns once the pool has it."""
    future: Future[dict[str, Array]] = Future()

    def call() -> None:
        try:
            future.set_result(pool.run(inputs, **options))
        except BaseException as error:  # noqa: BLE001 - the future is the only one to tell
            future.set_exception(error)

    before, until = pool.stats().pending, time.monotonic() + 0.2
    threading.Thread(target=call, daemon=True).start()
    while not future.done() and pool.stats().pending <= before and time.monotonic() < until:
        time.sleep(0.001)
    return future


def start_ticks(pid: int) -> int:
    """Returns when a process was started, in clock ticks since boot; 0 if there is none of that number."""
    return int(stat_of(pid)[19])


def _is_of_a_stranger(pid: int) -> bool:
    """Says whether a process is alive, not begun by this one, and not left behind by whoever began it."""
    parent = parent_of(pid)
    if parent <= 1:
        return False
    while pid > 1:
        if pid == os.getpid():
            return False
        pid = parent_of(pid)
    return True


def parent_of(pid: int) -> int:
    """Returns the process that began another, 0 where that is gone."""
    return int(stat_of(pid)[1])


def workers() -> set[int]:
    """Every worker of every pool, but for strangers'."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"pool.process import enter" in (path / "cmdline").read_bytes():
                found.add(int(path.name))
    return {pid for pid in found if not _is_of_a_stranger(pid)}


def shared_bytes() -> int:
    """How much memory of pools this process has mapped, in files without a name."""
    found, is_pool = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_pool = "memfd:ortprep" in line
        elif is_pool and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def descriptors() -> int:
    """How many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """No worker, no shared memory and no descriptor outlives a test of a pool."""
    if request.node.get_closest_marker("runtime") is None:
        yield
        return
    others, opened = workers(), descriptors()
    yield
    gc.collect()
    wait_for(lambda: not workers() - others, what="no worker is left")
    wait_for(lambda: shared_bytes() == 0, what="no shared memory is left")
    # Records of errors that pytest keeps refer to frames, and those to a pool: its file, and its event.
    wait_for(lambda: descriptors() <= opened + 2, what="no descriptor is left")
