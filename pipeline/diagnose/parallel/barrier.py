"""A barrier for threads of several processes: a file per place that each makes a byte longer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.errors import ChildError

T = TypeVar("T")

_PAUSE_S = 0.0005
_BROKEN = "broken"
_RELEASED = "another process or thread of this measurement failed"


@dataclass(frozen=True)
class Barrier:
    """Where participants wait for each other, at as many places as have names.

    Who started the participants limits how long they may take, and releases them where one is gone: a wait
    itself has no end.

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
        self.check()
        try:
            return (self.folder / place).stat().st_size >= self.participants
        except FileNotFoundError:
            return False

    def check(self) -> None:
        """Makes sure that nobody gave up.

        Raises:
            ChildError: Somebody did.
        """
        if (self.folder / _BROKEN).exists():
            raise ChildError(_RELEASED)

    def wait(self, place: str) -> None:
        """Arrives and waits for the others, to about a millisecond.

        Raises:
            ChildError: One of them gave up.
        """
        self.arrive(place)
        while not self.is_complete(place):
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


def was_released(error: BaseException) -> bool:
    """Says whether a participant failed merely because another one had given up."""
    return isinstance(error, ChildError) and _RELEASED in error.message


def values_of(futures: Sequence[Future[T]]) -> list[T]:
    """Waits for threads that meet at a barrier, and returns what they did.

    Raises:
        BaseException: What the one raised that the others did not get on for.
    """
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not was_released(error)), errors[0])
    return [future.result() for future in futures]
