"""What nodes tell of a build, and what failed there, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pipeline.errors
from pipeline.errors import ClusterError, PipelineError


@dataclass(frozen=True)
class Event:
    """One event of a build.

    Attributes:
        what: `placed`, `started`, `said`, `finished`, `current`, `failed`, `skipped`, as the methods of
            `graph.observer.Observer`, or `logged`.
        task: `STAGE:MODEL/VARIANT@KIND`; the model and kind alone where it is of the whole.
        text: A line that was said, why it failed, or the node's name.
    """

    what: str
    task: str
    text: str = ""


Tell = Callable[[Event], None]


@contextmanager
def told(name: str, tell: Tell) -> Iterator[None]:
    """Tells that a task is started, and if it fails, why."""
    tell(Event("started", name))
    try:
        yield
    except PipelineError as error:
        tell(Event("failed", name, str(error)))
        raise


@dataclass(frozen=True)
class Failure:
    """A `PipelineError`, as data.

    Attributes:
        error: Name of its class.
        message: What failed.
        hint: What the user can do.
    """

    error: str
    message: str
    hint: str | None = None

    @classmethod
    def of(cls, error: PipelineError) -> Failure:
        """Describes an error."""
        return cls(type(error).__name__, error.message, error.hint)

    def to_error(self) -> PipelineError:
        """Returns the error; of a class this version does not know, a `ClusterError`."""
        kind = getattr(pipeline.errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, PipelineError)):
            kind = ClusterError
        return kind(self.message, hint=self.hint)
