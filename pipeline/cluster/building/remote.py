"""What runs in Ray's processes: cells on the nodes, and the place where their events come together.

Arguments and results are JSON, as everywhere in ortprep; how Ray itself carries them is Ray's affair.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pipeline
from pipeline.bundle.codec import decode, encode
from pipeline.cluster.building.building_cell import build_cell
from pipeline.cluster.building.cell import ANYWHERE, Built, Cell
from pipeline.cluster.building.events import Event, Failure, Tell
from pipeline.cluster.building.fetching import fetch_cell
from pipeline.cluster.building.node_folder import working_folder
from pipeline.errors import ClusterError, PipelineError, SpecError, StageError
from pipeline.runtime.availability import unavailable_reason

log = logging.getLogger(__name__)


class Mailbox:
    """Collects events; an actor on the driver's node, which dies with the driver."""

    def __init__(self) -> None:
        self._events: list[str] = []

    def post(self, event: str) -> None:
        """Takes an event, as JSON."""
        self._events.append(event)

    def take(self) -> list[str]:
        """Returns what came since the last call, in order."""
        events, self._events = self._events, []
        return events


def run_cell(text: str, name: str, version: str, mailbox: Any, log_level: int) -> str:
    """Does a cell on this node, and returns what came of it.

    Args:
        text: A `Cell`, as JSON.
        name: The cell's name.
        version: Of ortprep, which asks; another one may write cells otherwise.
        mailbox: Handle of the `Mailbox` actor.
        log_level: Of what the package logs, this and above is posted.

    Returns:
        A `Built`, as JSON; whatever fails is in it, apart from what Ray is to try again.
    """
    import ray

    failed: list[str] = []

    def tell(event: Event) -> None:
        if event.what == "failed":
            failed.append(event.text)
        mailbox.post.remote(json.dumps(encode(event)))

    tell(Event("placed", name, ray.get_runtime_context().get_node_id()))
    with _logs_to(tell, name, log_level):
        try:
            with _bordered():
                built = _do(text, version, tell)
        except PipelineError as error:
            if str(error) not in failed:
                tell(Event("failed", name, str(error)))
            built = Built(failures=(Failure.of(error),))
    return json.dumps(encode(built))


def _do(text: str, version: str, tell: Tell) -> Built:
    if version != pipeline.__version__:
        raise ClusterError(
            f"a node has another version of ortprep\n  expected {version}, got {pipeline.__version__}",
            hint=f"pip install 'ortprep=={version}'   # on every node",
        )
    cell = decode(Cell, json.loads(text))
    if cell.kind != ANYWHERE:
        _check_target(cell)
        _be_as_important_as_jobs()
    with working_folder(cell) as folder:
        return (fetch_cell if cell.kind == ANYWHERE else build_cell)(cell, folder, tell)


def _check_target(cell: Cell) -> None:
    reason = unavailable_reason(cell.target)
    if reason is not None:
        raise SpecError(
            f"a node of kind {cell.kind} lacks what target {cell.target} needs\n  {reason}",
            hint="ortprep doctor env   # on that node",
        )


def _be_as_important_as_jobs() -> None:
    """Takes back the niceness that Ray gives its workers: what is measured has to run as jobs will."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        log.warning(
            "measuring at niceness %d, which whatever else runs here disturbs; "
            "start Ray with RAY_worker_niceness=0",
            niceness,
        )


@contextmanager
def _bordered() -> Iterator[None]:
    """Border: whatever is raised on a node leaves here as a PipelineError."""
    try:
        yield
    except PipelineError:
        raise
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        raise StageError(f"{error.strerror or error}{place}", hint="df -h   # on that node") from error
    except Exception as error:
        raise StageError(f"{type(error).__name__}: {error}", hint="ORTPREP_LOG=debug shows more") from error


class _Posting(logging.Handler):
    """Posts what the package logs; each line once, from wherever in the process."""

    def __init__(self, tell: Tell, name: str, level: int) -> None:
        super().__init__(level)
        self._tell, self._name = tell, name
        self._posting = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        # Ray may log while an event is posted.
        if getattr(self._posting, "now", False):
            return
        self._posting.now = True
        try:
            line = f"{record.levelname} {record.name}: {record.getMessage()}"
            self._tell(Event("logged", self._name, line))
        finally:
            self._posting.now = False


@contextmanager
def _logs_to(tell: Tell, name: str, level: int) -> Iterator[None]:
    own = logging.getLogger("pipeline")
    handler, before = _Posting(tell, name, level), own.level
    own.addHandler(handler)
    own.setLevel(level)
    try:
        yield
    finally:
        own.removeHandler(handler)
        own.setLevel(before)
