"""A line at which threads of several processes wait for each other: a file that each makes a byte longer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ChildError

_PAUSE_S = 0.0005
_TIMEOUT_S = 900.0
_BROKEN = "broken"
_RELEASED = "another process or thread of this measurement failed"


@dataclass(frozen=True)
class Line:
    """Where participants wait for each other, at as many places as have names.

    Attributes:
        folder: Empty when the first arrives; all participants see it.
        participants: How many there are, in all processes together.
    """

    folder: Path
    participants: int

    def arrive(self, place: str) -> None:
        """Says that a participant is there, and does not wait."""
        with (self.folder / place).open("ab", buffering=0) as file:
            file.write(b".")

    def is_complete(self, place: str) -> bool:
        """Says whether all have arrived.

        Raises:
            ChildError: One of them gave up, so that they never will.
        """
        if (self.folder / _BROKEN).exists():
            raise ChildError(_RELEASED)
        try:
            return (self.folder / place).stat().st_size >= self.participants
        except FileNotFoundError:
            return False

    def wait(self, place: str) -> None:
        """Arrives and waits for the others, to about a millisecond.

        Raises:
            ChildError: One of them gave up, or does not come.
        """
        self.arrive(place)
        end = time.monotonic() + _TIMEOUT_S
        while not self.is_complete(place):
            if time.monotonic() > end:
                raise ChildError(f"others did not get as far as {place!r} within {_TIMEOUT_S:g} s")
            time.sleep(_PAUSE_S)

    def give_up(self) -> None:
        """Releases all who wait, now and later, with an error."""
        (self.folder / _BROKEN).touch()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Gives up if the block fails, so that nobody waits for whom it was to become."""
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                self.give_up()


def cause_of(errors: Sequence[BaseException]) -> BaseException:
    """Returns, of the errors of several participants, the first that was not a mere release of who waited."""
    return next((error for error in errors if _RELEASED not in str(error)), errors[0])
