"""What runs in Ray's processes: jobs on the nodes, and the mailbox that collects their events.

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

import ortprep
from ortprep.bundle.codec import decode, encode
from ortprep.children.availability import unavailable_reason
from ortprep.cluster.building.job import BuildJob, Event, EventSink, JobResult
from ortprep.cluster.building.job_build import build_job
from ortprep.cluster.building.node_folder import working_folder
from ortprep.errors import ClusterError, PipelineError, SpecError, StageError, to_dict
from ortprep.versions import install_command

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


def run_job(text: str, name: str, version: str, mailbox: Any, log_level: int) -> str:
    """Runs a job on this node, and returns what came of it.

    Args:
        text: A `BuildJob`, as JSON.
        name: The job's name.
        version: Version of ortprep that asks; another one may write jobs otherwise.
        mailbox: Handle of the `Mailbox` actor.
        log_level: Lowest level of the package's log records that are posted.

    Returns:
        A `JobResult`, as JSON; whatever fails is in it, apart from what Ray is to try again.
    """
    import ray

    failed: list[str] = []

    def send(event: Event) -> None:
        if event.what == "failed":
            failed.append(event.text)
        mailbox.post.remote(json.dumps(encode(event)))

    send(Event("placed", name, ray.get_runtime_context().get_node_id()))
    with _logs_to(send, name, log_level):
        try:
            with _as_pipeline_error():
                result = _run(text, version, send)
        except PipelineError as error:
            if str(error) not in failed:
                send(Event("failed", name, str(error)))
            result = JobResult(failures=(to_dict(error),))
    return json.dumps(encode(result))


def _run(text: str, version: str, send: EventSink) -> JobResult:
    if version != ortprep.__version__:
        raise ClusterError(
            f"a node has another version of ortprep\n  expected {version}, got {ortprep.__version__}",
            hint=f"install the same checkout or wheel on every node; here: {install_command('build', 'ray')}",
        )
    job = decode(BuildJob, json.loads(text))
    _check_target(job)
    reset_niceness()
    with working_folder(job) as folder:
        return build_job(job, folder, send)


def _check_target(job: BuildJob) -> None:
    reason = unavailable_reason(job.target)
    if reason is not None:
        raise SpecError(
            f"a node of kind {job.kind} lacks what target {job.target} needs\n  {reason}",
            hint="ortprep doctor env   # on that node",
        )


def reset_niceness() -> None:
    """Takes back the niceness that Ray gives its workers: what is measured has to run as jobs will."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        log.warning(
            "measuring at niceness %d, so other processes on this node "
            "disturb it; start Ray with RAY_worker_niceness=0",
            niceness,
        )


@contextmanager
def _as_pipeline_error() -> Iterator[None]:
    """Turns whatever is raised on a node into a PipelineError."""
    try:
        yield
    except PipelineError:
        raise
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        raise StageError(f"{error.strerror or error}{place}", hint="df -h   # on that node") from error
    except Exception as error:  # a mistake of this program is reported like any failure, with its type
        raise StageError(f"{type(error).__name__}: {error}", hint="ORTPREP_LOG=debug shows more") from error


class _PostingHandler(logging.Handler):
    """Posts what the package logs; each line once, from wherever in the process."""

    def __init__(self, send: EventSink, name: str, level: int) -> None:
        super().__init__(level)
        self._send, self._name = send, name
        self._posting = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        # Ray may log while an event is posted.
        if getattr(self._posting, "now", False):
            return
        self._posting.now = True
        try:
            line = f"{record.levelname} {record.name}: {record.getMessage()}"
            self._send(Event("logged", self._name, line))
        finally:
            self._posting.now = False


@contextmanager
def _logs_to(send: EventSink, name: str, level: int) -> Iterator[None]:
    package_log = logging.getLogger("ortprep")
    handler, before = _PostingHandler(send, name, level), package_log.level
    package_log.addHandler(handler)
    package_log.setLevel(level)
    try:
        yield
    finally:
        package_log.removeHandler(handler)
        package_log.setLevel(before)
