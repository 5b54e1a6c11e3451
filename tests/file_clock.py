"""File systems stamp changes with a clock that ticks every few milliseconds."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for_a_tick(path: Path) -> None:
    """Waits until a change would get a later time than the last one of `path` has.

    Without it, a test on a fast machine may change a file twice within a tick; no program can see that.
    """
    probe = path.with_name(f"{path.name}.tick")
    last_ns = path.stat().st_ctime_ns
    probe.touch()
    while probe.stat().st_ctime_ns <= last_ns:
        time.sleep(0.001)
        probe.touch()
    probe.unlink()
