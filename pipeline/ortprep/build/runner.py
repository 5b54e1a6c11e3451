"""The runner of tasks: in topological order, one model after the other.

A task that fails holds up those that require it, and no other. `LineObserver` says in lines how it goes.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ortprep.build.build_plan import plan_builds
from ortprep.build.execution import Task, run_task, why_stale
from ortprep.bundle.digest import DigestCache
from ortprep.errors import PipelineError
from ortprep.stages.core.contract import TaskId


class Observer(Protocol):
    """Takes the events of a build. `task` is `STAGE:MODEL` or `STAGE:MODEL/VARIANT`."""

    def started(self, task: str) -> None:
        """A task begins."""

    def said(self, task: str, line: str) -> None:
        """A running task has something to say; may be called in another process than the other events."""

    def progressed(self, task: str, fraction: float) -> None:
        """A running task has done a fraction of its work, from 0 to 1; not every task or engine says so."""

    def finished(self, task: str) -> None:
        """A task was done."""

    def current(self, task: str) -> None:
        """A task was up to date."""

    def failed(self, task: str, message: str) -> None:
        """A task failed."""

    def skipped(self, task: str, message: str) -> None:
        """A task was not tried, because one before it failed."""

    def ended(self) -> None:
        """Nothing more comes."""


@dataclass(frozen=True)
class BuildRequest:
    """Models to prepare, and how.

    Attributes:
        configs: Folder of `NAME.yaml` files and `defaults.yaml`.
        artifacts: Folder of the bundles.
        names: Models; all of them if empty.
        jobs: Maximum number of concurrent tasks, on this machine.
    """

    configs: Path
    artifacts: Path
    names: tuple[str, ...] = ()
    only: str | None = None
    skip_unavailable: bool = False
    jobs: int = 1


def is_current(task: Task, cache: DigestCache) -> bool:
    """Returns whether a task's receipt and files are those of its present key."""
    try:
        return not why_stale(task, cache)
    except PipelineError:
        return False  # running it raises the error, with the task's name


def build_here(request: BuildRequest, observer: Observer) -> tuple[PipelineError, ...]:
    """Builds what is not up to date, one bundle after the other, and returns the errors of failed tasks.

    With several jobs, as many bundles are under way as keep them busy. A failed model holds up no other.

    Raises:
        SpecError: A spec is wrong, or a target is not available; nothing was started.
    """
    builds = plan_builds(
        request.configs,
        request.artifacts,
        names=request.names,
        only=request.only,
        skip_unavailable=request.skip_unavailable,
    )
    return run_builds(builds, observer, jobs=request.jobs)


def run_builds(
    builds: Sequence[Sequence[Task]], observer: Observer, *, jobs: int = 1, keep_going: bool = True
) -> tuple[PipelineError, ...]:
    """Runs all that is not up to date on this machine, and says when nothing more comes.

    Arguments and result are those of `run_tasks`.
    """
    try:
        return run_tasks(builds, observer, jobs=jobs, keep_going=keep_going)
    finally:
        observer.ended()


def run_tasks(
    builds: Sequence[Sequence[Task]],
    observer: Observer,
    *,
    jobs: int = 1,
    keep_going: bool = True,
) -> tuple[PipelineError, ...]:
    """Runs what is not up to date; a free thread takes the first task that has all it requires.

    So a model is finished before the next one begins; with several jobs, the next one takes idle threads.

    Args:
        builds: The tasks of each model, in build order; what they require and is not among them is done.
        observer: Takes the events of the run.
        jobs: Maximum number of concurrent tasks. With 1, all is done in the calling thread.
        keep_going: Whether tasks that do not need the failed one are tried.

    Returns:
        What failed, in the order of the failures.
    """
    run = _Run(builds, observer, keep_going)
    if jobs == 1:
        run.work()
        return tuple(run.errors)
    # An interrupt ends the program without waiting for threads; their child processes end with them.
    threads = [threading.Thread(target=run.work_in_thread, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if run.crash is not None:
        raise run.crash
    return tuple(run.errors)


def with_requirements(tasks: Sequence[Task], wanted: Sequence[Task]) -> tuple[Task, ...]:
    """Returns those of a model's tasks that are wanted or that a wanted one needs, in build order."""
    needed = {task.id for task in wanted}
    for task in reversed(tasks):
        if task.id in needed:
            needed.update(task.requires)
    return tuple(task for task in tasks if task.id in needed)


class _Run:
    """The state of one run, which its threads share."""

    def __init__(self, builds: Sequence[Sequence[Task]], observer: Observer, keep_going: bool) -> None:
        self._todo = [task for tasks in builds for task in tasks]
        self._unsettled = {(task.model, task.id) for task in self._todo}
        self._failed: dict[tuple[str, TaskId], str] = {}
        self._observer, self._keep_going, self._cache = observer, keep_going, DigestCache()
        self._changed = threading.Condition()
        self.errors: list[PipelineError] = []
        self.crash: BaseException | None = None

    def work_in_thread(self) -> None:
        """Does as `work`; keeps what is raised, and lets the other threads come to their end."""
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - raised again where the run was started
            with self._changed:
                self.crash = error
                self._todo.clear()
                self._changed.notify_all()

    def work(self) -> None:
        """Settles one task after the other, until none is left."""
        while (task := self._take()) is not None:
            self._settle(task)
            with self._changed:
                self._unsettled.discard((task.model, task.id))
                self._changed.notify_all()

    def _take(self) -> Task | None:
        """Returns the first task whose requirements are settled; waits for one if need be."""
        with self._changed:
            while self._todo:
                for task in self._todo:
                    if not any((task.model, required) in self._unsettled for required in task.requires):
                        self._todo.remove(task)
                        return task
                self._changed.wait()
        return None

    def _settle(self, task: Task) -> None:
        cause = next(filter(None, (self._failed.get((task.model, id_)) for id_ in task.requires)), None)
        if cause is not None:
            self._failed[task.model, task.id] = cause
            self._tell("skipped", task, f"{cause} failed")
            return
        try:
            if is_current(task, self._cache):
                self._tell("current", task)
                return
            self._tell("started", task)
            say = functools.partial(self._observer.said, task.name)
            progress = functools.partial(self._observer.progressed, task.name)
            run_task(task, cache=self._cache, say=say, progress=progress)
        except PipelineError as error:
            self._fail(task, error)
        else:
            self._tell("finished", task)

    def _fail(self, task: Task, error: PipelineError) -> None:
        with self._changed:
            self._tell("failed", task, str(error))
            self._failed[task.model, task.id] = task.name
            self.errors.append(error)
            if not self._keep_going:
                for other in self._todo:
                    self._tell("skipped", other, f"{task.name} failed")
                self._todo.clear()

    def _tell(self, event: str, task: Task, *text: str) -> None:
        """Passes an event on; observers count, so one at a time."""
        with self._changed:
            getattr(self._observer, event)(task.name, *text)


class LineObserver:
    """Writes a line for each task that is done or fails, and for what a running task says.

    Args:
        write: Takes the text of an event, which may have several lines.
        suffix: Text after the name of each task, such as `@KIND` on a node of a cluster.
    """

    def __init__(self, write: Callable[[str], object], *, suffix: str = "") -> None:
        self._write_line, self._suffix = write, suffix
        self._started_s: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def started(self, task: str) -> None:
        """Remembers when a task began."""
        self._started_s[task] = time.monotonic()

    def said(self, task: str, line: str) -> None:
        """Writes a line of a running task."""
        self._write_line(f"  {task}{self._suffix}: {line}")

    def progressed(self, task: str, fraction: float) -> None:
        """Writes nothing: lines show whole tasks."""

    def finished(self, task: str) -> None:
        """Writes that a task is done, and how long it took in seconds."""
        self._counts["done"] += 1
        now_s = time.monotonic()
        self._write_line(f"done {task}{self._suffix} ({now_s - self._started_s.get(task, now_s):.1f} s)")

    def current(self, task: str) -> None:  # noqa: ARG002
        """Counts a task that was up to date."""
        self._counts["current"] += 1

    def failed(self, task: str, message: str) -> None:
        """Writes why a task failed."""
        self._counts["failed"] += 1
        self._write_line(f"FAILED {task}{self._suffix}\nerror: {message}")

    def skipped(self, task: str, message: str) -> None:  # noqa: ARG002
        """Counts a task that was not tried, since one before it failed."""
        self._counts["skipped"] += 1

    def ended(self) -> None:
        """Writes how many tasks were done, up to date, failed and not tried."""
        count = self._counts
        if count["done"] or count["current"] or count["failed"]:
            failed = f", {count['failed']} failed, {count['skipped']} not tried" if count["failed"] else ""
            self._write_line(f"{count['done']} done, {count['current']} up to date{failed}")
