"""A model comes into the work store, from where its source can be read: the driver, or any node."""

from __future__ import annotations

import shutil
from pathlib import Path

from ortprep.bundle.digest import DigestCache, digest_json
from ortprep.cluster.building.job import FETCH, BuildJob, Event, EventSink, JobResult, reported
from ortprep.cluster.building.spec_files import place_spec
from ortprep.cluster.building.work_store import WorkStore
from ortprep.graph.build import STAGES
from ortprep.graph.execution import Task, build_tasks, run_on_device, why_other
from ortprep.graph.receipts import outcome_key, read_receipt, write_receipt
from ortprep.spec.fleet import ANYWHERE
from ortprep.stages.core.contract import Plan


def fetch_model(task: Task, store: WorkStore, send: EventSink) -> str:
    """Fetches a model into the work store, and returns the digest of what was fetched."""
    with reported(task.name, send):
        done = run_on_device(task, cache=DigestCache(), say=lambda line: send(Event("said", task.name, line)))
        receipt = read_receipt(task.receipt)
        assert receipt is not None
        store.upload_files(task.folder, receipt.files)
        source = digest_json(outcome_key(receipt))
        store.write_source(source, receipt)
        store.write_receipt(ANYWHERE, FETCH, receipt)
        send(Event("finished" if done else "current", task.name))
        return source


def fetch_on_node(job: BuildJob, folder: Path, send: EventSink) -> JobResult:
    """Fetches a model on a node, unless the store has it; raises as `fetch_model`."""
    store = WorkStore(job.store, job.model)
    task = place_tasks(job, store, folder)[0]
    known = store.read_receipt(ANYWHERE, FETCH)
    if known is not None:
        write_receipt(task.receipt, known)
        if not why_other(task) and store.has_files(known.files):
            source = digest_json(outcome_key(known))
            store.write_source(source, known)
            send(Event("current", task.name))
            return JobResult(source=source)
        task.receipt.unlink()
    return JobResult(source=fetch_model(task, store, send))


def place_tasks(job: BuildJob, store: WorkStore, folder: Path) -> tuple[Task, ...]:
    """Returns the model's tasks on this node, where the files of its spec are from now on."""
    files = folder / "spec"
    shutil.rmtree(files, ignore_errors=True)
    store.fetch_files(files, job.spec.files)
    plan = Plan(spec=place_spec(job.spec, files), targets=(job.target,), missing={})
    return build_tasks(plan, STAGES, folder / "artifacts")
