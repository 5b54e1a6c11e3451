"""Results of searches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ortprep.build.execution import Task
from ortprep.build.receipts import read_receipt
from ortprep.bundle.codec import decode
from ortprep.bundle.tuning_record import TuningRecord
from ortprep.errors import SpecError
from ortprep.quoting import quoted
from ortprep.stages.core.contract import LEFT_OUT
from ortprep.stages.core.results import PreparedResult


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


def read_searches(tasks: Iterable[Task]) -> dict[str, TuningRecord]:
    """Returns the records of searches, by `MODEL/VARIANT`, without variants that are not built.

    Raises:
        SpecError: One was not done.
    """
    searches = {}
    for task in tasks:
        receipt = read_receipt(task.receipt)
        if receipt is None:
            hint = f"ortprep tune {quoted(task.model)}"
            raise SpecError(f"not searched yet: {task.id} of {task.model}", hint=hint)
        if LEFT_OUT not in receipt.result:
            record = decode(PreparedResult, receipt.result).record
            assert record is not None
            searches[f"{task.model}/{task.id.variant}"] = record
    return searches
