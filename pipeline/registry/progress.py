"""What publishing and pulling tell their callers while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

Say = Callable[[str], None]
"""Takes a line for the user."""


@dataclass(frozen=True)
class Progress:
    """How far a transfer is.

    Attributes:
        what: `upload` or `download`.
        done_bytes: Of all files together.
        total_bytes: Likewise.
    """

    what: str
    done_bytes: int
    total_bytes: int


Observer = Callable[[Progress], None]
"""Called from any thread, one at a time."""


def ignore(event: object) -> None:
    """Does nothing with what it is told."""


class Meter:
    """Adds up what several threads report.

    Args:
        what: `upload` or `download`.
        total_bytes: Of all files together.
        observer: Told of every change.
    """

    def __init__(self, what: str, total_bytes: int, observer: Observer) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._observer = observer
        self._done_bytes = 0
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Takes a number of bytes more, or fewer."""
        with self._lock:
            self._done_bytes += size_bytes
            self._observer(Progress(self._what, self._done_bytes, self._total_bytes))
