"""Progress reports of publishing and pulling."""

from __future__ import annotations

import threading
from collections.abc import Callable


def ignore(event: object) -> None:
    """Does nothing with what it is told."""


class Progress:
    """Progress of an `upload` or `download`; several threads add to it.

    `observer` is called after every change, from any thread, one at a time.
    """

    def __init__(self, what: str, total_bytes: int, observer: Observer) -> None:
        self.what = what
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._observer = observer
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Takes a number of bytes more, or fewer."""
        with self._lock:
            self.done_bytes += size_bytes
            self._observer(self)


Observer = Callable[[Progress], None]
"""Looks at how far a transfer is."""
