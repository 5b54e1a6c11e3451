"""One model on one kind of hardware: what a node is asked for, tells meanwhile, and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ortprep.cluster.building.spec_files import ShippedSpec
from ortprep.errors import PipelineError
from ortprep.stages.core.contract import TaskId

PACKAGE = TaskId("package")


@dataclass(frozen=True)
class BuildJob:
    """What a node is to do.

    Attributes:
        spec: The model.
        source: Digest of what `fetch` left, which is built from.
        kind: Kind of hardware.
        target: What is prepared for: `cpu` or `cuda`.
        store: URL of the work store.
        registry: URL of the registry.
    """

    spec: ShippedSpec
    source: str
    kind: str
    target: str
    store: str
    registry: str

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.spec.data["name"])

    @property
    def name(self) -> str:
        """As people see it."""
        return f"{self.model}@{self.kind}"


@dataclass(frozen=True)
class JobResult:
    """What came of a job.

    Attributes:
        part: Digest of the part that was published; None if something failed.
        failures: What failed, as `ortprep.errors.to_dict` gives it.
    """

    part: str | None = None
    failures: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Event:
    """One event of a build.

    Attributes:
        what: `placed`, `started`, `said`, `finished`, `current`, `failed`, `skipped`, as the methods of
            `build.runner.Observer`, or `logged`.
        task: `STAGE:MODEL/VARIANT@KIND`; the model and kind alone where it is of the whole.
        text: A line that was said, why it failed, or the node's name.
    """

    what: str
    task: str
    text: str = ""


EventSink = Callable[[Event], None]


@contextmanager
def reported(name: str, send: EventSink) -> Iterator[None]:
    """Reports that a task starts, and if it fails, why."""
    send(Event("started", name))
    try:
        yield
    except PipelineError as error:
        send(Event("failed", name, str(error)))
        raise
