"""Runs a model's tasks one after the other in the calling thread, for programs that call the build."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ortprep.build.engine import Observer
from ortprep.build.execution import Task, run_on_device, why_stale
from ortprep.bundle.digest import DigestCache
from ortprep.errors import PipelineError


def run_in_order(tasks: Sequence[Task], observer: Observer) -> None:
    """Runs what is not up to date, as `ortprep prepare` does.

    Unlike doit it leaves the streams, signal handlers and arguments of the program alone.

    Args:
        tasks: The tasks of one model, in build order.
        observer: Told how it goes, in the calling thread; threads of a task may call `said` and `progressed`.

    Raises:
        PipelineError: A task failed; those after it were not tried.
    """
    cache = DigestCache()
    try:
        for index, task in enumerate(tasks):
            if _is_current(task, cache):
                observer.current(task.name)
                continue
            observer.started(task.name)
            try:
                run_on_device(
                    task,
                    cache=cache,
                    say=functools.partial(observer.said, task.name),
                    progress=functools.partial(observer.progressed, task.name),
                )
            except PipelineError as error:
                observer.failed(task.name, str(error))
                for other in tasks[index + 1 :]:
                    observer.skipped(other.name, f"{task.name} failed")
                raise
            observer.finished(task.name)
    finally:
        observer.ended()


def _is_current(task: Task, cache: DigestCache) -> bool:
    try:
        return not why_stale(task, cache)
    except PipelineError:
        return False  # running it raises the error, with the task's name
