"""A model of a spec for the doctor: its source as the build fetched it, and its bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortprep.bundle.codec import decode
from ortprep.bundle.manifest import MANIFEST_FILE
from ortprep.diagnose.doctor_model import DoctorModel
from ortprep.errors import SpecError
from ortprep.graph.build import plan_builds
from ortprep.graph.doit_tasks import run_doit
from ortprep.graph.engine import Observer
from ortprep.graph.execution import Task
from ortprep.graph.receipts import read_receipt
from ortprep.stages.core.inputs.samples import make_samples
from ortprep.stages.core.results import FetchResult


def examine_spec(
    name: str, folder: Path, *, configs: Path, artifacts: Path, observer: Observer
) -> DoctorModel:
    """Returns a spec's model as a subject; fetches its source first if needed.

    Raises:
        SpecError: The spec is missing, wrong, or does not fit its model.
        PipelineError: The source cannot be fetched.
    """
    tasks = plan_builds(configs, artifacts, names=(name,), skip_unavailable=True)[0]
    fetch = next(task for task in tasks if task.id.stage == "fetch")
    fetched = _fetched(fetch, tasks, observer)
    sample = make_samples(fetch.plan.spec, fetched.interface, folder / name)[0]
    bundle = artifacts / name
    return DoctorModel(
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
