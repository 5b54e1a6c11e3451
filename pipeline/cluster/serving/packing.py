"""Which requests go into one actor call: a call costs the same, be there one small request in it or many."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

SMALL_BYTES = 64 * 1024
"""Requests above this go alone, their arrays by way of the object store. Ray itself puts arguments there that
are larger than 100 KB (`max_direct_call_object_size`)."""

CALLS_AT_A_TIME = 2
"""One that an actor is at, and one that waits there, so that it never waits for the next."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A request as far as packing is concerned.

    Attributes:
        number: Of the request.
        size_bytes: Of its inputs.
        alone: Whether it travels by itself whatever its size: a worker died of it, or of one beside it, and
            the next death is to tell.
    """

    number: int
    size_bytes: int
    alone: bool = False

    @property
    def is_large(self) -> bool:
        """Whether its arrays go by way of the object store."""
        return self.size_bytes > SMALL_BYTES


@dataclass(slots=True)
class Call:
    """Requests that travel together.

    Attributes:
        numbers: Of the requests, in order.
        is_large: Whether their arrays go by way of the object store; then it is one request.
        is_answered: Whether the answer is here.
    """

    numbers: tuple[int, ...]
    is_large: bool = False
    is_answered: bool = False


def pack_call(waiting: deque[Parcel], *, most: int) -> Call | None:
    """Takes the next call's requests off the queue, in order; None if there are none.

    Of `CALLS_AT_A_TIME` requests or fewer each has a call to itself: that is all a worker is given whose runs
    are long, or not timed yet (`pipeline.runtime.pool.ledger.depth_for`), and the first would wait for the
    second. Together they would also be late together, and go on as a pair.

    Args:
        waiting: Requests of a worker that are not on their way yet.
        most: Requests that a call may carry.
    """
    if not waiting:
        return None
    are_few = len(waiting) <= CALLS_AT_A_TIME
    first = waiting.popleft()
    if are_few or first.is_large or first.alone:
        return Call((first.number,), is_large=first.is_large)
    numbers, size_bytes = [first.number], first.size_bytes
    while waiting and len(numbers) < most and not waiting[0].alone:
        if size_bytes + waiting[0].size_bytes > SMALL_BYTES:
            break
        parcel = waiting.popleft()
        numbers.append(parcel.number)
        size_bytes += parcel.size_bytes
    return Call(tuple(numbers))


def find_suspects(calls: Sequence[Call]) -> tuple[int, ...]:
    """Returns the requests that an actor may have died of: those of its oldest call.

    Calls are answered in order, so it had not begun with those behind.

    Args:
        calls: What it had, the oldest first.
    """
    return calls[0].numbers if calls else ()
