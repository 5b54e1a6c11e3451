"""What runs in Ray's processes: cells on the nodes, and the place where their events come together.

Arguments and results are JSON, as everywhere in ortprep; how Ray itself carries them is Ray's affair.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.bundle.codec import decode, encode
from pipeline.cluster.building.cell import ANYWHERE, Built, Cell, build_cell, fetch_cell
from pipeline.cluster.building.events import Event, Failure
from pipeline.errors import PipelineError


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


def run_cell(text: str, mailbox: Any, log_level: int) -> str:
    """Does a cell on this node, and returns what came of it.

    Args:
        text: A `Cell`, as JSON.
        mailbox: Handle of the `Mailbox` actor.
        log_level: Of what the package logs, this and above is posted.

    Returns:
        A `Built`, as JSON; whatever fails is in it, apart from what Ray is to try again.
    """
    import ray

    cell = decode(Cell, json.loads(text))
    where = f"{cell.spec.data['name']}@{cell.kind}"

    def tell(event: Event) -> None:
        mailbox.post.remote(json.dumps(encode(event)))

    tell(Event("placed", where, ray.get_runtime_context().get_node_id()))
    with _logs_to(tell, where, log_level):
        try:
            built = fetch_cell(cell, tell) if cell.kind == ANYWHERE else build_cell(cell, tell)
        except PipelineError as error:
            tell(Event("failed", where, str(error)))
            built = Built(None, (Failure.of(error),))
    return json.dumps(encode(built))


class _Posting(logging.Handler):
    """Posts what the package logs; each line once, from wherever in the process."""

    def __init__(self, tell: Any, where: str, level: int) -> None:
        super().__init__(level)
        self._tell, self._where = tell, where
        self._posting = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        # Ray may log while an event is posted.
        if getattr(self._posting, "now", False):
            return
        self._posting.now = True
        try:
            self._tell(
                Event("logged", self._where, f"{record.levelname} {record.name}: {record.getMessage()}")
            )
        finally:
            self._posting.now = False


@contextmanager
def _logs_to(tell: Any, where: str, level: int) -> Iterator[None]:
    own = logging.getLogger("pipeline")
    handler, before = _Posting(tell, where, level), own.level
    own.addHandler(handler)
    own.setLevel(level)
    try:
        yield
    finally:
        own.removeHandler(handler)
        own.setLevel(before)
