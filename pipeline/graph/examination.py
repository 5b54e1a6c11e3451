"""A model of a spec for the doctor to examine: its source as the build fetched it, and its bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.bundle.codec import decode
from pipeline.bundle.manifest import MANIFEST_FILE
from pipeline.diagnose.subject import Subject
from pipeline.errors import SpecError
from pipeline.graph.build import plan_builds
from pipeline.graph.doit_tasks import run_doit
from pipeline.graph.execution import Task
from pipeline.graph.observer import Observer
from pipeline.graph.receipts import read_receipt
from pipeline.stages.inputs.samples import make_samples
from pipeline.stages.results import FetchResult


def examine_spec(name: str, folder: Path, *, configs: Path, artifacts: Path, observer: Observer) -> Subject:
    """Returns a spec's model as a subject; its source is fetched first, if that was not done.

    Args:
        name: Of the model.
        folder: Where its input is written.
        configs: Folder of specs.
        artifacts: Folder of bundles and intermediate files.
        observer: Told how the fetching goes.

    Raises:
        SpecError: There is no such spec, it is wrong, or does not fit its model.
        PipelineError: The source cannot be fetched.
    """
    tasks = plan_builds(configs, artifacts, names=(name,), skip_unavailable=True)[0]
    fetch = next(task for task in tasks if task.id.stage == "fetch")
    fetched = _fetched(fetch, tasks, observer)
    sample = make_samples(fetch.plan.spec, fetched.interface, folder / name)[0]
    bundle = artifacts / name
    return Subject(
        name,
        sample.file,
        str(fetch.folder / fetched.model),
        str(bundle.resolve()) if (bundle / MANIFEST_FILE).is_file() else None,
    )


def _fetched(fetch: Task, tasks: Sequence[Task], observer: Observer) -> FetchResult:
    code, errors = run_doit([tasks], observer, tasks=[fetch.name])
    if errors:
        raise errors[0]
    receipt = read_receipt(fetch.receipt)
    if code or receipt is None:
        raise SpecError(f"source was not fetched: {fetch.model}", hint=f"doit {fetch.name}")
    return decode(FetchResult, receipt.result)
