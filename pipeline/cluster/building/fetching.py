"""A model comes into the work store, from where its source can be read: the driver, or any node."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.bundle.digest import DigestCache
from pipeline.cluster.building.cell import ANYWHERE, FETCH, Built, Cell, Moved, digest_outcome
from pipeline.cluster.building.events import Event, Tell, told
from pipeline.cluster.building.spec_files import place_spec
from pipeline.cluster.building.work_store import WorkStore
from pipeline.graph.build import STAGES
from pipeline.graph.execution import Task, build_tasks, run_on_device, why_other
from pipeline.graph.receipts import read_receipt, write_receipt
from pipeline.stages.contract import Plan


def fetch_model(task: Task, store: WorkStore, tell: Tell) -> tuple[str, int]:
    """Fetches a model into the work store.

    Args:
        task: The model's first.
        store: Where to.
        tell: Told how it goes.

    Returns:
        The digest of what was fetched, and how many bytes went to the store.

    Raises:
        PipelineError: It cannot be had, or the store failed.
    """
    with told(task.name, tell):
        done = run_on_device(task, cache=DigestCache(), say=lambda line: tell(Event("said", task.name, line)))
        receipt = read_receipt(task.receipt)
        assert receipt is not None
        sent = store.upload_files(task.folder, receipt.files)
        source = digest_outcome(receipt)
        store.write_source(source, receipt)
        store.write_receipt(ANYWHERE, FETCH, receipt)
        tell(Event("finished" if done else "current", task.name))
        return source, sent


def fetch_cell(cell: Cell, folder: Path, tell: Tell) -> Built:
    """Fetches a model on a node, unless the store has it.

    Args:
        cell: Of the kind `ANYWHERE`.
        folder: Where to work.
        tell: Told how it goes.

    Raises:
        PipelineError: As `fetch_model`.
    """
    store = WorkStore(cell.store, cell.model)
    task = place_tasks(cell, store, folder)[0]
    known = store.read_receipt(ANYWHERE, FETCH)
    if known is not None:
        write_receipt(task.receipt, known)
        if not why_other(task) and store.has_files(known.files):
            source = digest_outcome(known)
            store.write_source(source, known)
            tell(Event("current", task.name))
            return Built(source=source)
        task.receipt.unlink()
    source, sent = fetch_model(task, store, tell)
    return Built(source=source, moved=Moved(stored=sent))


def place_tasks(cell: Cell, store: WorkStore, folder: Path) -> tuple[Task, ...]:
    """Returns the model's tasks on this node, where the files of its spec are from now on.

    Raises:
        NotPublishedError: A file of the spec is not in the store.
        RegistryError: The store failed.
    """
    files = folder / "spec"
    shutil.rmtree(files, ignore_errors=True)
    store.fetch_files(files, cell.spec.files)
    plan = Plan(spec=place_spec(cell.spec, files), targets=(cell.target,), missing={})
    return build_tasks(plan, STAGES, folder / "artifacts")
