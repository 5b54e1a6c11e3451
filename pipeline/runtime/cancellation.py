"""How a load that is under way in one thread is stopped from another."""

from __future__ import annotations

from typing import Any


class Cancellation:
    """Stops a load, whether it is asked to before the load begins or during it.

    It takes no lock, since a garbage collector may call it in the middle of anything. Both sides write first
    and look then, so that one of them always sees the other.
    """

    def __init__(self) -> None:
        self._options: Any = None
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether the load is to stop."""
        return self._requested

    def cover(self, options: Any) -> None:
        """Makes the load with these `onnxruntime.SessionOptions` the one that is stopped."""
        self._options = options
        if self._requested:
            options.set_load_cancellation_flag(True)

    def release(self) -> None:
        """Leaves the options alone from now on: the load is over, and they may be somebody's own."""
        self._options = None

    def request(self) -> None:
        """Asks the load to stop; ONNX Runtime does so at its next look."""
        self._requested = True
        options = self._options
        if options is not None:
            options.set_load_cancellation_flag(True)
