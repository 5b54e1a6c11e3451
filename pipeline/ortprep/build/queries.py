"""Answers about a build for other commands: reasons, searches, and a model for the doctor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.build.build_plan import plan_builds
from ortprep.build.execution import Task, why_stale
from ortprep.build.observers import Observer
from ortprep.build.receipts import NEVER_DONE, find_receipt, read_receipt
from ortprep.build.runner import run_builds
from ortprep.bundle.codec import decode
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.manifest import MANIFEST_FILE
from ortprep.errors import PipelineError
from ortprep.stages.core.contract import TaskId
from ortprep.stages.core.results import FetchResult
from ortprep.stages.core.samples import make_samples

if TYPE_CHECKING:
    from ortprep.doctor.doctor_model import DoctorModel


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


def examine_spec(
    name: str, folder: Path, *, configs: Path, artifacts: Path, observer: Observer
) -> DoctorModel:
    """Returns a spec's model as a subject; fetches its source first if needed.

    Raises:
        SpecError: The spec is missing, wrong, or does not fit its model.
        PipelineError: The source cannot be fetched.
    """
    from ortprep.doctor.doctor_model import DoctorModel

    tasks = plan_builds(configs, artifacts, names=(name,), skip_unavailable=True)[0]
    fetch = next(task for task in tasks if task.id.stage == "fetch")
    for error in run_builds(((fetch,),), observer):
        raise error
    receipt = read_receipt(fetch.receipt)
    assert receipt is not None
    fetched = decode(FetchResult, receipt.result)
    sample = make_samples(fetch.plan.spec, fetched.interface, folder / name)[0]
    bundle = artifacts / name
    return DoctorModel(
        name,
        sample.file,
        str(fetch.folder / fetched.model),
        str(bundle.resolve()) if (bundle / MANIFEST_FILE).is_file() else None,
    )
