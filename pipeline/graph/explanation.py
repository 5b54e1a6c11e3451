"""What `prepare` would do, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ortprep.bundle.digest import DigestCache
from ortprep.errors import PipelineError
from ortprep.graph.execution import Task, why_stale
from ortprep.graph.receipts import read_receipt, receipt_path
from ortprep.stages.core.contract import TaskId


@dataclass(frozen=True)
class Explanation:
    """Why one task would run; no reasons means it would not."""

    model: str
    task: TaskId
    reasons: tuple[str, ...]


def explain_tasks(tasks: Iterable[Task], *, cache: DigestCache) -> tuple[Explanation, ...]:
    """Returns, for tasks in build order, why each would run, those before it taken into account."""
    explanations: list[Explanation] = []
    stale: set[TaskId] = set()
    for task in tasks:
        waiting = tuple(f"{required} runs before it" for required in task.requires if required in stale)
        reasons = waiting if _is_new(task) else (*waiting, *_reasons(task, cache))
        if reasons:
            stale.add(task.id)
        explanations.append(Explanation(task.model, task.id, reasons))
    return tuple(explanations)


def _is_new(task: Task) -> bool:
    """Says whether something before the task was never done, so that its own key is not known yet."""
    return any(read_receipt(receipt_path(task.artifacts, task.model, id_)) is None for id_ in task.requires)


def _reasons(task: Task, cache: DigestCache) -> tuple[str, ...]:
    try:
        return why_stale(task, cache)
    except PipelineError as error:
        return (f"it would fail: {error.message}",)


def format_explanations(explanations: Iterable[Explanation]) -> Iterator[str]:
    """Yields explanations as lines for a person."""
    for explanation in explanations:
        head = f"{explanation.model}: {explanation.task}"
        yield f"{head}: runs, because" if explanation.reasons else f"{head}: up to date"
        yield from (f"    {line}" for reason in explanation.reasons for line in reason.split("\n"))
