"""Results of searches, and measuring one of their trials again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ortprep.build.execution import Task, open_context
from ortprep.build.receipts import read_receipt
from ortprep.bundle.codec import decode
from ortprep.bundle.tuning_record import TuningRecord
from ortprep.errors import SpecError
from ortprep.quoting import quoted
from ortprep.stages.core.contract import LEFT_OUT
from ortprep.stages.core.results import PreparedResult
from ortprep.stages.tune.remeasurement import Remeasurement, measure_again


def tune_tasks(builds: Sequence[Sequence[Task]], *, named: bool = True) -> tuple[Task, ...]:
    """Returns the tasks that search.

    Args:
        builds: The tasks of each model.
        named: Whether the user named the models; else models without a search are skipped if another has one.

    Raises:
        SpecError: A model's spec asks for no search.
    """
    searches = tuple(task for tasks in builds for task in tasks if task.id.stage == "tune")
    searched = {task.model for task in searches}
    off = [tasks[0].model for tasks in builds if tasks[0].model not in searched]
    if off and (named or not searches):
        raise SpecError(
            f"search is off for {off[0]}\n  expected tune.max_trials above 0, got 0",
            hint="tune: {max_trials: 100}   # in its spec",
        )
    return searches


def read_search(task: Task) -> TuningRecord:
    """Returns the record of a task's search.

    Raises:
        SpecError: It was not done, or its variant is not built.
    """
    receipt = read_receipt(task.receipt)
    if receipt is None:
        raise SpecError(
            f"not searched yet: {task.id} of {task.model}", hint=f"ortprep tune {quoted(task.model)}"
        )
    if LEFT_OUT in receipt.result:
        raise SpecError(f"nothing was searched: {task.id} of {task.model}\n  {receipt.result[LEFT_OUT]}")
    record = decode(PreparedResult, receipt.result).record
    assert record is not None
    return record


def read_searches(tasks: Iterable[Task]) -> dict[str, TuningRecord]:
    """Returns the records of searches, by `MODEL/VARIANT`, without variants that are not built.

    Raises:
        SpecError: One was not done.
    """
    return {
        f"{task.model}/{task.id.variant}": read_search(task)
        for task in tasks
        if (receipt := read_receipt(task.receipt)) is None or LEFT_OUT not in receipt.result
    }


def find_search(tasks: Sequence[Task], variant: str | None) -> Task:
    """Returns the task that searches for a variant, or the first one if none is named.

    Raises:
        SpecError: The variant is not searched.
    """
    search = next((task for task in tasks if variant in (None, task.id.variant)), None)
    if search is None:
        names = ", ".join(str(task.id.variant) for task in tasks)
        raise SpecError(
            f"no such variant of {tasks[0].model}: {variant}\n  expected one of {names}",
            hint=f"ortprep trial {quoted(tasks[0].model)} N --variant {quoted(tasks[0].id.variant)}",
        )
    return search


def measure_trial_again(task: Task, number: int, *, rounds: int, say: Callable[[str], None]) -> Remeasurement:
    """Measures one trial of a task's search again; writes its files again if needed.

    Raises:
        SpecError: There was no search, or no such trial.
        PipelineError: The plan fails.
    """
    record = read_search(task)
    with tempfile.TemporaryDirectory(prefix=".tmp-trial~", dir=task.folder.parent) as folder:
        return measure_again(open_context(task, Path(folder), say), record, number, rounds=rounds)
