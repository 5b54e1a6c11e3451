"""The build as doit sees it; the only module that knows doit.

doit selects, lists and cleans tasks; our receipts alone decide whether one is up to date. doit writes its own
database only when a run ends, so a killed run would forget, and it takes an equal modification time for an
equal file. So that database stays in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from doit.exceptions import BaseFail, InvalidTask, TaskFailed, UnmetDependency
from doit.reporter import ZeroReporter

from ortprep.build.execution import Task, remove_intermediates, remove_outcome
from ortprep.build.observers import BuildEvent, Observer
from ortprep.build.runner import is_current, run_tasks
from ortprep.bundle.digest import DigestCache
from ortprep.errors import PipelineError

STAGE_DOCS = {
    "fetch": "copy the source model, its digest checked",
    "convert": "fuse, bind shapes, change precision, and check the answers",
    "optimize": "optimise the graph once and lint what was written",
    "verify": "compare the answers with the source's",
    "tune": "search for the best way to store, load and run it",
    "measure": "measure default ONNX Runtime against the prepared model",
    "package": "make the bundle visible, in one rename",
}


def doit_config(observer: Observer) -> dict[str, Any]:
    """Returns DOIT_CONFIG for a dodo.py."""
    return {
        "default_tasks": ["prepare"],
        "backend": "sqlite3",
        "dep_file": ":memory:",
        "reporter": Reporter(observer),
        "verbosity": 2,
        # A failed model never holds up another.
        "continue": True,
        # Threads: a stage's work is in child processes anyway, errors come back whole, and processes of doit
        # would each answer an interrupt with a traceback.
        "par_type": "thread",
    }


def build_doit_tasks(builds: Sequence[Sequence[Task]], observer: Observer) -> Iterator[dict[str, Any]]:
    """Yields every task as doit takes it.

    `prepare:NAME` runs all tasks of a model, so that doit finishes one model before it begins the next. Tasks
    of stages are for users who want a stage alone.

    Args:
        builds: The tasks of each model, in build order.
        observer: Takes the events of a run.
    """
    yield {"basename": "prepare", "name": None, "doc": "build every bundle that is not up to date"}
    used = {task.id.stage for tasks in builds for task in tasks}
    for stage, doc in STAGE_DOCS.items():
        if stage in used:
            yield {"basename": stage, "name": None, "doc": doc}
    for tasks in builds:
        yield from _tasks_of_model(tasks, observer)


def _tasks_of_model(tasks: Sequence[Task], observer: Observer) -> Iterator[dict[str, Any]]:
    """Yields a model's tasks: to prepare it, and each stage."""
    cache, model = DigestCache(), tasks[0].model
    yield {
        "basename": "prepare",
        "name": model,
        "actions": [functools.partial(_run, tasks, observer)],
        "clean": [
            (remove_outcomes, (tasks[::-1],)),
            (remove_intermediates, (tasks[0].artifacts, model)),
        ],
        "doc": f"the bundle {model}",
    }
    names = {task.id: task.name for task in tasks}
    for task in tasks:
        yield {
            "basename": task.id.stage,
            "name": task.name.partition(":")[2],
            "actions": [functools.partial(_run, (task,), observer)],
            "task_dep": [names[required] for required in task.requires],
            "uptodate": [functools.partial(is_current, task, cache)],
            "clean": [(remove_outcomes, ((task,),))],
            "doc": STAGE_DOCS[task.id.stage],
        }


def remove_outcomes(tasks: Sequence[Task]) -> None:
    """Removes what tasks left; doit shows the function's name."""
    for task in tasks:
        remove_outcome(task)


def _run(tasks: Sequence[Task], observer: Observer) -> TaskFailed | None:
    errors = run_tasks((tasks,), observer)
    return TaskFailed(str(errors[0])) if errors else None


def spec_errors_as_doit_errors(
    create: Callable[[], Iterator[dict[str, Any]]],
) -> Callable[[], Iterator[dict[str, Any]]]:
    """Makes doit print a wrong spec as a message instead of a traceback."""

    @functools.wraps(create)
    def create_tasks() -> Iterator[dict[str, Any]]:
        try:
            yield from create()
        except PipelineError as error:
            raise InvalidTask(str(error)) from error

    return create_tasks


class Reporter(ZeroReporter):  # type: ignore[misc]
    """Tells an `Observer` what doit alone knows; the actions tell the rest. The method names are doit's."""

    desc = "one line per task"

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def add_failure(self, task: Any, fail: BaseFail) -> None:
        """Called when a task failed, or was not tried because another failed."""
        if isinstance(fail, UnmetDependency):
            self._observer(BuildEvent("skipped", task.name, fail.message))
        elif not isinstance(fail, TaskFailed):
            self._observer(BuildEvent("failed", task.name, fail.get_msg().strip()))

    def skip_uptodate(self, task: Any) -> None:
        """Called when a task was up to date."""
        self._observer(BuildEvent("current", task.name))

    def runtime_error(self, msg: str) -> None:
        """Called when doit itself cannot go on."""
        self._observer(BuildEvent("failed", "doit", msg))

    def complete_run(self) -> None:
        """Called when nothing more comes."""
        self._observer(BuildEvent("ended"))
