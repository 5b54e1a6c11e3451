"""What Ray raises, in this package's words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ray import exceptions

from pipeline.errors import PoolError, WorkerDiedError

_LINES, _CHARACTERS = 12, 300
_FIELD = re.compile(r"(class_name|actor_id|pid|namespace|ip|name): ")


def is_death(error: BaseException) -> bool:
    """Says whether an actor is gone, or cannot be told from one that is; an exception of its code is none.

    Ray raises `ActorUnavailableError` where it cannot reach an actor that may live on behind a broken
    network; such an actor is ended, so that no request is answered twice.
    """
    return isinstance(error, exceptions.RayError) and not isinstance(error, exceptions.RayTaskError)


def is_node_gone(error: BaseException) -> bool:
    """Says whether an actor's node is gone, so that there is no use in starting it again there."""
    if isinstance(error, exceptions.ActorUnschedulableError | exceptions.NodeDiedError):
        return True
    return isinstance(error, exceptions.ActorDiedError) and "its node has died" in str(error)


def died(name: str, pid: int | None, error: BaseException | None, *, reason: str = "") -> WorkerDiedError:
    """Returns what the request fails with that a worker died of.

    Args:
        name: Of the worker, which begins with its node's.
        pid: Its process there; None if it never had one.
        error: What Ray says; None where this process ended it.
        reason: Why it was ended.
    """
    lines = () if error is None else shorten(str(error))
    said = "".join(f"\n    {line}" for line in lines if not _FIELD.match(line))
    because = f": {reason}" if reason else ""
    found = WorkerDiedError(f"{name} died{because}\n  pid {pid or 'unknown'}{said}")
    found.pid, found.stderr = pid or 0, tuple(lines)
    return found


def failed(name: str, error: BaseException) -> PoolError:
    """Returns what requests fail with where an actor raised what is none of this package's errors."""
    lines = shorten(str(error))
    return PoolError(f"{name} failed\n  {lines[-1] if lines else type(error).__name__}")


def shorten(text: str) -> Sequence[str]:
    """Returns the last lines of what Ray says."""
    lines = [line.strip()[:_CHARACTERS] for line in text.splitlines() if line.strip()]
    return tuple(lines[-_LINES:])
