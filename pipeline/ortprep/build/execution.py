"""Task state and task execution: the only place that runs stages."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ortprep
from ortprep.build.receipts import (
    RECEIPT_VERSION,
    TaskReceipt,
    changed_files,
    differences,
    find_receipt,
    model_folder,
    outcome_key,
    read_receipt,
    receipt_path,
    task_folder,
    write_receipt,
)
from ortprep.bundle.atomic import new_folder, remove_stale_temporaries
from ortprep.bundle.codec import encode
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.verification import describe_files
from ortprep.errors import PipelineError, StageError, hint_of_os_error
from ortprep.measuring.device_lock import lock_file, working
from ortprep.quoting import quoted
from ortprep.stages.core.contract import (
    LEFT_OUT,
    Context,
    Plan,
    Progress,
    Stage,
    TaskId,
    Upstream,
)

log = logging.getLogger(__name__)

_LOCKS = "locks"

Say = Callable[[str], None]

MEASURING = ("tune", "measure")
"""Stages that lock their device themselves; all other work shares the machine."""


@dataclass(frozen=True)
class Task:
    """One stage of one plan, for one variant.

    Attributes:
        artifacts: Folder of bundles and intermediate files.
    """

    stage: Stage
    plan: Plan
    id: TaskId
    artifacts: Path

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.plan.spec.name

    @property
    def name(self) -> str:
        """Name for the user and for doit: `STAGE:MODEL` or `STAGE:MODEL/VARIANT`."""
        variant = self.id.variant
        return f"{self.id.stage}:{self.model}" + (f"/{variant}" if variant else "")

    @property
    def requires(self) -> tuple[TaskId, ...]:
        """Tasks that come before this one."""
        return self.stage.requires(self.plan, self.id.variant)

    @property
    def folder(self) -> Path:
        """Folder of the task's files."""
        return task_folder(self.artifacts, self.model, self.id)

    @property
    def receipt(self) -> Path:
        """File of its receipt."""
        return receipt_path(self.artifacts, self.model, self.id)


def build_tasks(plan: Plan, stages: tuple[Stage, ...], artifacts: Path) -> tuple[Task, ...]:
    """Returns a plan's tasks, each after those it requires."""
    tasks = [
        Task(stage=stage, plan=plan, id=TaskId(stage.name, variant), artifacts=artifacts)
        for stage in stages
        for variant in stage.variants(plan)
    ]
    by_id = {task.id: task for task in tasks}
    # By stage as far as that goes: a precision is judged by answers that another variant was verified with.
    ordered: dict[TaskId, Task] = {}

    def place(task: Task) -> None:
        if task.id not in ordered:
            for required in task.requires:
                place(by_id[required])
            ordered[task.id] = task

    for task in tasks:
        place(task)
    return tuple(ordered.values())


def why_stale(task: Task, cache: DigestCache) -> tuple[str, ...]:
    """Returns why a task has to run, one reason a line; nothing if it is up to date.

    Raises:
        PipelineError: The key cannot be computed: the source file is missing, say.
    """
    with _task_errors(task):
        return _find_reasons(task, cache)


def _find_reasons(task: Task, cache: DigestCache) -> tuple[str, ...]:
    receipt = find_receipt(task.receipt)
    if isinstance(receipt, str):
        return (receipt,)
    missing = [str(required) for required in task.requires if _receipt_of(task, required) is None]
    if missing:
        return tuple(f"{name} has to run first" for name in missing)
    changes = tuple(differences(receipt.key, _full_key(task)))
    return changes or changed_files(task.folder, receipt, cache.digest)


def run_task(task: Task, *, cache: DigestCache, say: Say, progress: Progress = lambda _: None) -> bool:
    """Runs a task unless it is up to date, and returns whether it did.

    One process at a time works on a task; a second one waits and then finds it done. The files appear in one
    rename and the receipt comes last, so a kill leaves the old outcome or a task that runs again.

    Raises:
        PipelineError: The work failed; nothing of it is visible.
    """

    def on_wait() -> None:
        say("waiting until a measurement on this machine ends")

    with _task_errors(task), _locked(task, say):
        reasons = _find_reasons(task, cache)
        if not reasons:
            return False
        key = _full_key(task)
        for place in (task.folder, task.receipt):
            remove_stale_temporaries(place)
        with new_folder(task.folder) as folder:
            with nullcontext() if task.id.stage in MEASURING else working(on_wait=on_wait):
                context = open_context(task, folder, say)
                result = _run_stage(replace(context, key=key, progress=progress), task)
            entries = describe_files(folder, with_blocks=False)
        receipt = TaskReceipt(
            schema_version=RECEIPT_VERSION,
            task=str(task.id),
            key=key,
            files=entries,
            result=result,
        )
        write_receipt(task.receipt, receipt)
        return True


def remove_outcome(task: Task) -> None:
    """Removes a task's files and receipt."""
    task.receipt.unlink(missing_ok=True)
    shutil.rmtree(task.folder, ignore_errors=True)


def remove_intermediates(artifacts: Path, model: str) -> None:
    """Removes all of a model's intermediate files, also those of variants that its spec does not have now."""
    for folder in model_folder(artifacts, model).glob("*"):
        if folder.name != _LOCKS:  # who waits for a removed lock would get one that nobody else sees
            shutil.rmtree(folder, ignore_errors=True)


def open_context(task: Task, folder: Path, say: Say) -> Context:
    """Returns the context of a task's stage.

    Raises:
        StageError: A required task was not done.
    """
    receipts = {required: _require(task, required) for required in task.requires}
    upstream = {
        required: Upstream(task_folder(task.artifacts, task.model, required), receipt.result, receipt.key)
        for required, receipt in receipts.items()
    }
    return Context(plan=task.plan, variant=task.id.variant, upstream=upstream, folder=folder, say=say)


def _run_stage(context: Context, task: Task) -> Mapping[str, Any]:
    """Returns a stage's result, or why its variant is left out; a task without a variant always runs."""
    reasons = [one.result[LEFT_OUT] for one in context.upstream.values() if LEFT_OUT in one.result]
    if reasons and context.variant is not None:
        return {LEFT_OUT: str(reasons[0])}
    result: Mapping[str, Any] = encode(task.stage.run(context))
    return result


def _full_key(task: Task) -> dict[str, Any]:
    """Returns everything that decides a task's outcome, as its receipt records it."""
    own = encode(task.stage.key(task.plan, task.id.variant))
    upstream = {str(required): outcome_key(_require(task, required)) for required in task.requires}
    return {
        **own,
        "pipeline": ortprep.__version__,
        "stage_version": task.stage.version,
        "upstream": upstream,
    }


def _receipt_of(task: Task, required: TaskId) -> TaskReceipt | None:
    return read_receipt(receipt_path(task.artifacts, task.model, required))


def _require(task: Task, required: TaskId) -> TaskReceipt:
    receipt = _receipt_of(task, required)
    if receipt is None:
        raise StageError(
            f"{required} of {task.model} has to run first",
            hint=f"ortprep prepare {quoted(task.model)}",
        )
    return receipt


@contextmanager
def _locked(task: Task, say: Say) -> Iterator[None]:
    """Keeps other processes from the task; says so before it waits for one."""
    folder = model_folder(task.artifacts, task.model) / _LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)  # another user who can open a lock can hold it for ever
    path = folder / f"{str(task.id).replace('/', '-')}.lock"
    with lock_file(path, lambda: say("waiting for another process that builds the same")):
        yield


@contextmanager
def _task_errors(task: Task) -> Iterator[None]:
    """Turns every error of a task into a PipelineError that names it, so that only its model fails.

    Raises:
        PipelineError: As inside, or a `StageError` for any other exception.
    """
    what = f"{task.id} of {task.model}"
    try:
        yield
    except PipelineError as error:
        raise type(error)(f"{what}: {error.message}", hint=error.hint) from error
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        # A full disk is met while writing, where Python does not know the file's name.
        hint = hint_of_os_error(error, str(task.artifacts), tempfile.gettempdir())
        raise StageError(f"{what}: {error.strerror or error}{place}", hint=hint) from error
    except Exception as error:  # a mistake of this program is reported like any failure, with its type
        log.debug("%s failed", what, exc_info=True)
        raise StageError(
            f"{what}: {type(error).__name__}: {error}", hint="ORTPREP_LOG=debug shows where"
        ) from error
