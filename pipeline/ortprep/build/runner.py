"""The runner of tasks: in topological order, one model after the other.

A task that fails holds up those that require it, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence

from ortprep.build.execution import Task, run_task, why_stale
from ortprep.build.observers import BuildEvent, Observer
from ortprep.bundle.digest import DigestCache
from ortprep.errors import PipelineError
from ortprep.stages.core.contract import TaskId


def is_current(task: Task, cache: DigestCache) -> bool:
    """Returns whether a task's receipt and files are those of its present key."""
    try:
        return not why_stale(task, cache)
    except PipelineError:
        return False  # running it raises the error, with the task's name


def run_builds(builds: Sequence[Sequence[Task]], observer: Observer) -> tuple[PipelineError, ...]:
    """Runs all that is not up to date on this machine, and says when nothing more comes.

    Arguments and result are those of `run_tasks`.
    """
    try:
        return run_tasks(builds, observer)
    finally:
        observer(BuildEvent("ended"))


def run_tasks(builds: Sequence[Sequence[Task]], observer: Observer) -> tuple[PipelineError, ...]:
    """Runs what is not up to date, one task after the other: a model is finished before the next one begins.

    Args:
        builds: The tasks of each model, in build order; what they require and is not among them is done.
        observer: Takes the events of the run.

    Returns:
        What failed, in the order of the failures.
    """
    failed: dict[tuple[str, TaskId], str] = {}
    errors: list[PipelineError] = []
    cache = DigestCache()
    for task in (task for tasks in builds for task in tasks):
        cause = next(filter(None, (failed.get((task.model, one)) for one in task.requires)), None)
        if cause is not None:
            failed[task.model, task.id] = cause
            observer(BuildEvent("skipped", task.name, f"{cause} failed"))
            continue
        try:
            _run(task, observer, cache)
        except PipelineError as error:
            observer(BuildEvent("failed", task.name, str(error)))
            failed[task.model, task.id] = task.name
            errors.append(error)
    return tuple(errors)


def _run(task: Task, observer: Observer, cache: DigestCache) -> None:
    """Runs a task unless it is up to date; raises as `run_task`."""
    name = task.name
    if is_current(task, cache):
        observer(BuildEvent("current", name))
        return
    observer(BuildEvent("started", name))
    run_task(
        task,
        cache=cache,
        say=lambda line: observer(BuildEvent("said", name, line)),
        progress=lambda fraction: observer(BuildEvent("progressed", name, fraction=fraction)),
    )
    observer(BuildEvent("finished", name))
