"""A model of a spec for the doctor: its source as the build fetched it, and its bundle."""

from __future__ import annotations

from pathlib import Path

from ortprep.build.build_plan import plan_builds
from ortprep.build.receipts import read_receipt
from ortprep.build.runner import Observer, run_builds
from ortprep.bundle.codec import decode
from ortprep.bundle.manifest import MANIFEST_FILE
from ortprep.doctor.doctor_model import DoctorModel
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
