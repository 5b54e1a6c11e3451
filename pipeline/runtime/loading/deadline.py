"""When a load has to be done."""

from __future__ import annotations

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
        if timeout_s is not None and not timeout_s >= 0:
            from pipeline.errors import LoadError

            raise LoadError(
                f"bad argument of load: timeout_s={timeout_s!r}\n  expected seconds, 0 or more",
                hint="load(…, timeout_s=30), or None for no deadline",
            )
        self._timeout_s = timeout_s
        self._subject = subject
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

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


NO_DEADLINE = Deadline(None, subject="")
