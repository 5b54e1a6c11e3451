"""The build as doit sees it; the only module that knows doit.

doit orders and parallelises the tasks; our receipts alone decide whether one is up to date. doit writes its
own database only when a run ends, so a killed run would forget, and it takes an equal modification time for
an equal file. So that database stays in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doit.cmd_base import ModuleTaskLoader
from doit.doit_cmd import DoitMain
from doit.exceptions import BaseFail, InvalidTask, TaskFailed, UnmetDependency

from ortprep.build.build_plan import plan_builds
from ortprep.build.engine import BuildRequest, BuildResult, Observer
from ortprep.build.execution import Task, remove_outcome, run_on_device, why_stale
from ortprep.build.explanation import explain_tasks, format_explanations
from ortprep.build.receipts import REPORT_FILE
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.manifest import MANIFEST_FILE
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

Errors = list[PipelineError]


def doit_config(observer: Observer) -> dict[str, Any]:
    """Returns DOIT_CONFIG for a dodo.py."""
    return {
        "default_tasks": ["prepare"],
        "backend": "sqlite3",
        "dep_file": ":memory:",
        "reporter": Reporter(observer),
        "verbosity": 2,
        # Threads: a stage's work is in child processes anyway, errors come back whole, and processes of doit
        # would each answer an interrupt with a traceback.
        "par_type": "thread",
    }


def build_doit_tasks(
    builds: Sequence[Sequence[Task]],
    observer: Observer,
    write: Callable[[str], None],
    errors: Errors | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields every task as doit takes it."""
    cache = DigestCache()
    yield {"basename": "prepare", "name": None, "doc": "build every bundle that is not up to date"}
    used = {task.id.stage for tasks in builds for task in tasks}
    for stage, doc in STAGE_DOCS.items():
        if stage in used:
            yield {"basename": stage, "name": None, "doc": doc}
    yield {"basename": "explain", "name": None, "doc": "say what prepare would do, and why"}
    yield _report_task(builds, observer, errors)
    if any(tasks[-1].plan.spec.publish for tasks in builds):
        yield {"basename": "publish", "name": None, "doc": "publish every bundle whose spec says where"}
    for tasks in builds:
        model = tasks[0].model
        by_id = {task.id: task for task in tasks}
        last = tasks[-1].name
        yield {
            "basename": "prepare",
            "name": model,
            "actions": None,
            "task_dep": [last],
            "clean": [_removal_of(tasks[::-1])],
            "doc": f"the bundle {model}",
        }
        yield {
            "basename": "explain",
            "name": model,
            "actions": [functools.partial(_explain, tasks, cache, write)],
            "uptodate": [False],
            "doc": f"what prepare:{model} would do, and why",
        }
        if tasks[-1].plan.spec.publish is not None:
            yield {
                "basename": "publish",
                "name": model,
                "actions": [functools.partial(_publish, tasks[-1], f"publish:{model}", observer, errors)],
                "task_dep": [f"prepare:{model}"],
                # The registry knows whether there is anything to do.
                "uptodate": [False],
                "doc": f"publish the bundle {model}, as publish: in its spec says",
            }
        for task in tasks:
            requires = [by_id[required].name for required in task.requires]
            yield _doit_task(task, requires, observer, cache, errors)


def _doit_task(
    task: Task, requires: list[str], observer: Observer, cache: DigestCache, errors: Errors | None
) -> dict[str, Any]:
    name = task.name
    return {
        "basename": task.id.stage,
        "name": name.partition(":")[2],
        "actions": [functools.partial(_act, task, name, observer, cache, errors)],
        "task_dep": requires,
        "uptodate": [functools.partial(_is_current, task, cache)],
        "clean": [_removal_of((task,))],
        "doc": STAGE_DOCS[task.id.stage],
    }


def _report_task(
    builds: Sequence[Sequence[Task]], observer: Observer, errors: Errors | None
) -> dict[str, Any]:
    packages = [tasks[-1] for tasks in builds]
    manifests = [task.folder / MANIFEST_FILE for task in packages]
    out = packages[0].artifacts / REPORT_FILE if packages else None
    return {
        "basename": "report",
        "actions": [functools.partial(_report, manifests, out, observer, errors)],
        "task_dep": [f"prepare:{task.model}" for task in packages],
        "uptodate": [functools.partial(_is_report_current, manifests, out)],
        "clean": []
        if out is None
        else [_Removal("the report", functools.partial(out.unlink, missing_ok=True))],
        "doc": "write a report on all bundles as one HTML file",
    }


@dataclass(frozen=True)
class _Removal:
    """Removes what tasks left, for `doit clean`."""

    name: str
    remove: Callable[[], None]

    def __call__(self) -> None:
        self.remove()

    def __str__(self) -> str:
        # doit shows an action's text without its first character, taking it for the < of a function's repr.
        return f"<remove {self.name}"


def _removal_of(tasks: Sequence[Task]) -> _Removal:
    def remove() -> None:
        for task in tasks:
            remove_outcome(task)

    more = " and what it was made from" if len(tasks) > 1 else ""
    return _Removal(f"{tasks[0].folder}{more}", remove)


def _act(
    task: Task, name: str, observer: Observer, cache: DigestCache, errors: Errors | None
) -> TaskFailed | None:
    say, progress = functools.partial(observer.said, name), functools.partial(observer.progressed, name)
    return _attempt(lambda: run_on_device(task, cache=cache, say=say, progress=progress), errors)


def _attempt(work: Callable[[], object], errors: Errors | None) -> TaskFailed | None:
    """Does a task's work; a `PipelineError` is the task's failure, and is collected."""
    try:
        work()
    except PipelineError as error:
        if errors is not None:
            errors.append(error)
        return TaskFailed(str(error))
    return None


def _publish(task: Task, name: str, observer: Observer, errors: Errors | None) -> TaskFailed | None:
    # Imported here: a machine that only builds need not have what registries need.
    from ortprep.build.publication import publish_model

    return _attempt(lambda: publish_model(task, functools.partial(observer.said, name)), errors)


def _report(
    manifests: Sequence[Path], out: Path | None, observer: Observer, errors: Errors | None
) -> TaskFailed | None:
    # Imported here: a machine that only builds need not have what reports need.
    from ortprep.build.report_file import write_report

    def write() -> None:
        if out is not None:
            size_bytes = write_report(manifests, out)
            observer.said("report", f"{out}: {size_bytes / 2**20:.1f} MB")

    return _attempt(write, errors)


def _is_report_current(manifests: Sequence[Path], out: Path | None) -> bool:
    from ortprep.build.report_file import is_report_current

    return out is None or is_report_current(manifests, out)


def _is_current(task: Task, cache: DigestCache) -> bool:
    try:
        return not why_stale(task, cache)
    except PipelineError:
        return False  # running it raises the error where it is reported


def _explain(tasks: Sequence[Task], cache: DigestCache, write: Callable[[str], None]) -> None:
    for line in format_explanations(explain_tasks(tasks, cache=cache)):
        write(line)


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


def run_doit(
    builds: Sequence[Sequence[Task]],
    observer: Observer,
    *,
    jobs: int = 1,
    tasks: Sequence[str] = ("prepare",),
) -> tuple[int, tuple[PipelineError, ...]]:
    """Runs `prepare` for these models, as `doit prepare` does; when one fails, the others go on.

    Args:
        builds: The tasks of each model, in build order.
        observer: Told how it goes.
        jobs: How many tasks may run at once.
        tasks: Names of other tasks to run, and of all they need, instead of `prepare`.

    Returns:
        doit's exit code (0: all done) and the errors of tasks that failed in this process.
    """
    errors: Errors = []
    namespace: Mapping[str, Any] = {
        "DOIT_CONFIG": doit_config(observer),
        "task_build": lambda: build_doit_tasks(builds, observer, lambda _: None, errors),
    }
    arguments = ["run", "--continue"]
    if jobs > 1:
        arguments += ["-n", str(jobs)]
    code: int = DoitMain(ModuleTaskLoader(dict(namespace)), config_filenames=()).run([*arguments, *tasks])
    return code, tuple(errors)


class Reporter:
    """Turns doit's reports into events of an `Observer`; the method names are doit's."""

    desc = "one line per task"

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def initialize(self, tasks: object, selected_tasks: object) -> None:
        """Called before anything runs."""

    def get_status(self, task: Any) -> None:
        """Called when a task is about to be looked at."""

    def execute_task(self, task: Any) -> None:
        """Called when a task starts."""
        if task.actions and not task.name.startswith("explain"):
            self._observer.started(task.name)

    def add_failure(self, task: Any, fail: BaseFail) -> None:
        """Called when a task failed, or was not tried because another failed."""
        if isinstance(fail, UnmetDependency):
            self._observer.skipped(task.name, fail.message)
        else:
            self._observer.failed(task.name, fail.get_msg().strip())

    def add_success(self, task: Any) -> None:
        """Called when a task was done."""
        if task.actions and not task.name.startswith("explain"):
            self._observer.finished(task.name)

    def skip_uptodate(self, task: Any) -> None:
        """Called when a task was up to date."""
        self._observer.current(task.name)

    def skip_ignore(self, task: Any) -> None:
        """Called for a task the user told doit to ignore."""

    def cleanup_error(self, exception: BaseFail) -> None:
        """Called when a teardown failed; there are none."""

    def runtime_error(self, msg: str) -> None:
        """Called when doit itself cannot go on."""
        self._observer.failed("doit", msg)

    def teardown_task(self, task: Any) -> None:
        """Called before a teardown."""

    def complete_run(self) -> None:
        """Called when nothing more comes."""
        self._observer.ended()


class DoitEngine:
    """doit, on this machine."""

    def prepare(self, order: BuildRequest, observer: Observer) -> BuildResult:
        """Builds what is not up to date; raises as `Engine.prepare` does."""
        builds = plan_builds(
            order.configs,
            order.artifacts,
            names=order.names,
            only=order.only,
            skip_unavailable=order.skip_unavailable,
        )
        code, errors = run_doit(builds, observer, jobs=order.jobs)
        return BuildResult(code == 0, errors)
