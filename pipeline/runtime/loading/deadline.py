"""When a load has to be done."""

from __future__ import annotations

import _thread
import math
import time


class Deadline:
    """A moment after which a load is given up.

    Args:
        timeout_s: Seconds from now; None for no deadline.
        subject: What is loaded, for messages.

    Raises:
        LoadError: `timeout_s` is below 0 or not a number.
    """

    def __init__(self, timeout_s: float | None, *, subject: str) -> None:
        try:
            seconds = None if timeout_s is None else float(timeout_s)
        except OverflowError:
            seconds = math.inf
        if seconds is not None and not seconds >= 0:
            from pipeline.errors import LoadError

            raise LoadError(
                f"bad argument of load: timeout_s={timeout_s!r}\n  expected seconds, 0 or more",
                hint="load(…, timeout_s=30), or None for no deadline",
            )
        self._timeout_s = seconds
        self._subject = subject
        self._end = None if seconds is None else time.monotonic() + seconds

    def remaining_s(self) -> float | None:
        """Returns the seconds left, None without deadline.

        Raises:
            LoadTimeoutError: There are none left.
        """
        if self._end is None:
            return None
        remaining_s = self._end - time.monotonic()
        if remaining_s <= 0:
            from pipeline.errors import LoadTimeoutError

            raise LoadTimeoutError(
                f"load took too long: {self._subject}\n"
                f"  expected a session within {self._timeout_s:g} s, got none",
                hint=LoadTimeoutError.HINT,
            )
        return remaining_s

    def acquire(self, lock: _thread.LockType) -> None:
        """Waits for a lock, which is then the caller's.

        Raises:
            LoadTimeoutError: The deadline passed.
        """
        while not lock.acquire(timeout=min(self.remaining_s() or math.inf, _thread.TIMEOUT_MAX)):
            pass


NO_DEADLINE = Deadline(None, subject="")
