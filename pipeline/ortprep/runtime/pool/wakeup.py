"""How the supervisor is woken."""

from __future__ import annotations

import os
import time
from contextlib import suppress


class WakeupEvent:
    """Wakes the supervisor, which waits in the kernel; it takes no lock, so it may be set at any time.

    Attributes:
        planned: When the supervisor looks at the clock next, by `time.monotonic()`.
        stop_at: When workers that were told to end are killed; None while the pool goes on.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.planned = 0.0
        self.stop_at: float | None = None

    def set(self) -> None:
        """Wakes the supervisor now."""
        with suppress(BlockingIOError):
            os.eventfd_write(self.descriptor, 1)

    def watch(self, deadline: float) -> None:
        """Wakes the supervisor if it would otherwise sleep beyond a deadline."""
        if deadline < self.planned:
            self.set()

    def stop_soon(self, grace_s: float = 0.0) -> None:
        """Has the supervisor end the workers, after `grace_s` seconds for what they are at."""
        until = time.monotonic() + grace_s
        self.stop_at = until if self.stop_at is None else min(self.stop_at, until)
        self.set()

    def clear(self) -> None:
        """Makes the descriptor unreadable again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        # Only now: a late caller of `set` must not write to what has the number since.
        if self.descriptor >= 0:
            os.close(self.descriptor)
