"""Why tasks would run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ortprep.build.execution import Task, why_stale
from ortprep.build.receipts import NEVER_DONE, find_receipt
from ortprep.bundle.digest import DigestCache
from ortprep.errors import PipelineError
from ortprep.stages.core.contract import TaskId


@dataclass(frozen=True)
class Explanation:
    """Reasons for which one task would run.

    Attributes:
        model: Name of its model.
        reasons: One reason a line; none if it would not run.
        is_new: Whether it was never done.
    """

    model: str
    task: TaskId
    reasons: tuple[str, ...]
    is_new: bool = False


def explain_tasks(tasks: Iterable[Task], *, cache: DigestCache) -> tuple[Explanation, ...]:
    """Returns, for tasks in build order, why each would run, those before it taken into account."""
    explanations: list[Explanation] = []
    stale: set[TaskId] = set()
    for task in tasks:
        waiting = tuple(f"{required} runs before it" for required in task.requires if required in stale)
        # What else would change is known once those have run.
        reasons = waiting or _reasons(task, cache)
        if reasons:
            stale.add(task.id)
        is_new = find_receipt(task.receipt) == NEVER_DONE
        explanations.append(Explanation(task.model, task.id, reasons, is_new))
    return tuple(explanations)


def _reasons(task: Task, cache: DigestCache) -> tuple[str, ...]:
    try:
        return why_stale(task, cache)
    except PipelineError as error:
        return (f"it would fail: {error.message}",)


def format_explanations(explanations: Iterable[Explanation]) -> Iterator[str]:
    """Yields explanations as lines for a person; a model that is all new or all up to date takes one."""
    for model, group in groupby(explanations, lambda explanation: explanation.model):
        tasks = tuple(group)
        stale = [explanation for explanation in tasks if explanation.reasons]
        if not stale:
            yield f"{model}: up to date, {_count_stages(tasks)}"
        elif all(explanation.is_new for explanation in tasks):
            yield f"{model}: never done; runs {_count_stages(tasks)}"
        else:
            for explanation in stale:
                yield f"{model}: {explanation.task}: runs, because"
                yield from (f"    {line}" for reason in explanation.reasons for line in reason.split("\n"))
            if len(stale) < len(tasks):
                yield f"{model}: {len(tasks) - len(stale)} other tasks up to date"


def _count_stages(tasks: Iterable[Explanation]) -> str:
    """Returns the stages in order, each with its number of tasks where that is more than one."""
    counts = Counter(explanation.task.stage for explanation in tasks)
    return ", ".join(f"{stage} ({count})" if count > 1 else stage for stage, count in counts.items())
