"""Every stage of a job on the node that has its hardware, then publishing. Knows no Ray.

What another node has done is taken from the work store by receipt; only what a stage reads is fetched. So a
build goes on wherever the last one was broken off, on whatever node of the kind: if that node is another
make of machine, keys differ, and what depends on the machine is done again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ortprep.build.execution import Task, run_task, why_other
from ortprep.build.receipts import (
    TaskReceipt,
    changed_files,
    read_receipt,
    receipt_path,
    task_folder,
    write_receipt,
)
from ortprep.build.runner import run_tasks
from ortprep.bundle.digest import DigestCache
from ortprep.cluster.building.job import PACKAGE, BuildJob, Event, EventSink, JobResult
from ortprep.cluster.building.source_fetch import place_tasks
from ortprep.cluster.building.work_store import WorkStore
from ortprep.errors import ClusterError, IntegrityError, NotPublishedError, to_dict
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.publish import publish
from ortprep.registry.retries import with_retries
from ortprep.stages.core.contract import Progress, TaskId

MAX_PUBLISH_ATTEMPTS = 8
"""How often a job publishes where the registry refuses it for its load: for three quarters of a minute."""

_PUBLISHED = "published"
"""Key of the packaging's receipt that says which part of which registry it became."""


def build_job(job: BuildJob, folder: Path, send: EventSink) -> JobResult:
    """Runs every stage that is not up to date, and publishes the bundle; the model was fetched before."""
    return _JobRun(job, folder, send).run()


class _JobRun:
    """What a node does with single tasks: an `Executor`."""

    def __init__(self, job: BuildJob, folder: Path, send: EventSink) -> None:
        self._job, self._folder, self._send = job, folder, send
        self._store = WorkStore(job.store, job.model)
        self._cache = DigestCache()
        self._tasks: dict[TaskId, Task] = {}
        self._part: str | None = None

    def run(self) -> JobResult:
        first, *tasks = place_tasks(self._job, self._store, self._folder)
        source = self._store.read_source(self._job.source)
        if source is None:
            raise self._lost(first.id)
        write_receipt(first.receipt, source)
        self._tasks = {task.id: task for task in tasks}
        failures = run_tasks((tasks,), _Sender(self._send, self._job.kind), executor=self)
        return JobResult(None if failures else self._part, failures=tuple(map(to_dict, failures)))

    def is_current(self, task: Task) -> bool:
        """Returns whether this node or another has done a task; takes over what the store knows of it."""
        stored = self._learn(task)
        return stored is not None and self._is_done(task, stored)

    def execute(self, task: Task, say: Callable[[str], None], progress: Progress) -> None:
        """Runs a task here, and stores or publishes what it left."""
        for required in task.requires:
            self._restore(task, required, say)
        run_task(task, cache=self._cache, say=say, progress=progress)
        receipt = read_receipt(task.receipt)
        assert receipt is not None
        if task.id == PACKAGE:
            receipt = self._publish(task, receipt)
        else:
            self._store.upload_files(task.folder, receipt.files)
        self._store.write_receipt(self._job.kind, task.id, receipt)

    def _learn(self, task: Task) -> TaskReceipt | None:
        """Takes over what the store knows of a task, unless this node has done it since, and was killed."""
        stored = self._store.read_receipt(self._job.kind, task.id)
        local = read_receipt(task.receipt)
        if stored is not None and (local is None or (not _same(local, stored) and why_other(task))):
            write_receipt(task.receipt, stored)
        return stored

    def _is_done(self, task: Task, stored: TaskReceipt) -> bool:
        local = read_receipt(task.receipt)
        if local is None or not _same(local, stored) or why_other(task):
            return False
        if task.id != PACKAGE:
            return True
        published = stored.result.get(_PUBLISHED, {})
        if published.get("registry") != self._job.registry:
            return False
        with open_catalogue(self._job.registry) as catalogue:
            versions = catalogue.read_state(task.model).versions.values()
            if all(published.get("part") not in version.part_digests for version in versions):
                return False
        self._part = str(published["part"])
        return True

    def _restore(self, task: Task, required: TaskId, say: Callable[[str], None]) -> None:
        """Fetches the files that a task left, unless they are here; what is lost is made again."""
        upstream = self._tasks.get(required)
        folder = task_folder(task.artifacts, task.model, required)
        path = receipt_path(task.artifacts, task.model, required)
        receipt = read_receipt(path)
        if receipt is None or not changed_files(folder, receipt, self._cache.digest):
            return
        try:
            self._store.fetch_files(folder, receipt.files)
        except (NotPublishedError, IntegrityError) as error:
            if upstream is None:
                raise self._lost(required) from error
            say(f"running {required} again: {error.message}")
            self._store.delete_receipt(self._job.kind, required)
            path.unlink()
            for failure in run_tasks(((upstream,),), _Sender(self._send, self._job.kind), executor=self):
                raise failure from error

    def _lost(self, task: TaskId) -> ClusterError:
        return ClusterError(
            f"the work store has lost the output of {task} of {self._job.model}",
            hint="run it again to store it again; if that does not help, check that this node sees the store",
        )

    def _publish(self, task: Task, receipt: TaskReceipt) -> TaskReceipt:
        with open_catalogue(self._job.registry) as catalogue:
            # Registries limit a fleet that publishes at once; hours of work are worth a minute's wait.
            published = with_retries(lambda: publish(task.folder, catalogue), attempts=MAX_PUBLISH_ATTEMPTS)
        self._part = published.part
        where = {"registry": self._job.registry, "part": published.part}
        return replace(receipt, result={**receipt.result, _PUBLISHED: where})


class _Sender:
    """An observer that sends what it is told, with the kind of hardware in each task's name."""

    def __init__(self, send: EventSink, kind: str) -> None:
        self._send, self._kind = send, kind

    def _emit(self, event: str, task: str, text: str = "") -> None:
        self._send(Event(event, f"{task}@{self._kind}", text))

    def started(self, task: str) -> None:
        self._emit("started", task)

    def finished(self, task: str) -> None:
        self._emit("finished", task)

    def current(self, task: str) -> None:
        self._emit("current", task)

    def said(self, task: str, line: str) -> None:
        self._emit("said", task, line)

    def failed(self, task: str, message: str) -> None:
        self._emit("failed", task, message)

    def skipped(self, task: str, message: str) -> None:
        self._emit("skipped", task, message)

    def progressed(self, task: str, fraction: float) -> None:
        """Sends nothing: what is shown of a cluster is whole tasks."""

    def ended(self) -> None:
        """Sends nothing: the job's result says so."""


def _same(first: TaskReceipt, second: TaskReceipt) -> bool:
    """Says whether two receipts are of one outcome; one of them may say where that was published."""
    results = [{key: value for key, value in r.result.items() if key != _PUBLISHED} for r in (first, second)]
    return (first.key, first.files, results[0]) == (second.key, second.files, results[1])
