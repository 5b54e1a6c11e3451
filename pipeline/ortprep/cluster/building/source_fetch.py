"""The driver brings a model into the work store; nodes place it there."""

from __future__ import annotations

import shutil
from pathlib import Path

from ortprep.build.build_plan import STAGES
from ortprep.build.execution import Task, build_tasks, run_task
from ortprep.build.receipts import outcome_key, read_receipt
from ortprep.bundle.digest import DigestCache, digest_json
from ortprep.cluster.building.job import BuildJob, Event, EventSink
from ortprep.cluster.building.spec_files import place_spec
from ortprep.cluster.building.work_store import WorkStore
from ortprep.stages.core.contract import Plan


def fetch_model(task: Task, store: WorkStore, send: EventSink) -> str:
    """Fetches a model into the work store, and returns the digest of what was fetched."""
    done = run_task(task, cache=DigestCache(), say=lambda line: send(Event("said", task.name, line)))
    receipt = read_receipt(task.receipt)
    assert receipt is not None
    store.upload_files(task.folder, receipt.files)
    source = digest_json(outcome_key(receipt))
    store.write_source(source, receipt)
    send(Event("finished" if done else "current", task.name))
    return source


def place_tasks(job: BuildJob, store: WorkStore, folder: Path) -> tuple[Task, ...]:
    """Returns the model's tasks on this node, where the files of its spec are from now on."""
    files = folder / "spec"
    shutil.rmtree(files, ignore_errors=True)
    store.fetch_files(files, job.spec.files)
    plan = Plan(spec=place_spec(job.spec, files), targets=(job.target,), missing={})
    return build_tasks(plan, STAGES, folder / "artifacts")
