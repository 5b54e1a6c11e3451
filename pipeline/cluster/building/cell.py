"""One model on one kind of hardware, on the node that has it: every stage, then publishing. Knows no Ray.

What another node has done is taken from the work store by receipt; only what a stage reads is fetched. So a
build goes on wherever the last one was broken off, on whatever node of the kind: if that node is another
make of machine, keys differ, and what depends on the machine is done again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pipeline
from pipeline.bundle.digest import DigestCache, default_cache_folder
from pipeline.cluster.building.events import Event, Failure, Tell
from pipeline.cluster.building.spec_files import ShippedSpec, place_spec
from pipeline.cluster.building.work_store import WorkStore
from pipeline.errors import ClusterError, NotPublishedError, PipelineError, SpecError
from pipeline.graph.build import STAGES
from pipeline.graph.execution import Task, build_tasks, run_on_device, why_other
from pipeline.graph.receipts import Receipt, read_receipt, receipt_path, task_folder, write_receipt
from pipeline.registry.catalogue import open_catalogue
from pipeline.registry.publishing import publish
from pipeline.registry.retries import with_retries
from pipeline.runtime.availability import unavailable_reason
from pipeline.stages.contract import Plan, TaskId

ANYWHERE = "anywhere"
"""In the place of a kind of hardware: receipts of what is the same for all of them."""

FETCH = TaskId("fetch")
PACKAGE = TaskId("package")
PUBLISHED = "published"
"""Key of the packaging's receipt that says which part of which registry it became."""


PUBLISHINGS = 8
"""How often a cell publishes where the registry refuses it for its load: for three quarters of a minute."""


@dataclass(frozen=True)
class Cell:
    """What a node is to do.

    Attributes:
        spec: The model.
        kind: Kind of hardware.
        target: What is prepared for: `cpu` or `cuda`.
        store: URL of the work store.
        registry: URL of the registry.
        pipeline_version: Version of ortprep that asked for it.
    """

    spec: ShippedSpec
    kind: str
    target: str
    store: str
    registry: str
    pipeline_version: str


@dataclass(frozen=True)
class Built:
    """What came of a cell.

    Attributes:
        part: Digest of the part that was published; None if something failed.
        failures: What failed.
        moved_bytes: What went to the work store, what came from it, and what went to the registry.
    """

    part: str | None
    failures: tuple[Failure, ...]
    moved_bytes: tuple[int, int, int] = (0, 0, 0)


def fetch_model(task: Task, store: WorkStore, tell: Tell) -> None:
    """Fetches a model into the work store, wherever its source can be read.

    Args:
        task: The model's first.
        store: Where to.
        tell: Told how it goes.

    Raises:
        PipelineError: It cannot be had, or the store failed.
    """
    name = task.name
    with _told(name, tell):
        done = run_on_device(task, cache=DigestCache(), say=lambda line: tell(Event("said", name, line)))
        receipt = read_receipt(task.receipt)
        assert receipt is not None
        store.upload_files(task.folder, receipt.files)
        store.write_receipt(ANYWHERE, FETCH, receipt)
        tell(Event("finished" if done else "current", name))


def fetch_cell(cell: Cell, tell: Tell) -> Built:
    """Fetches a model whose source can be read from any node, unless the store has it.

    Args:
        cell: Of the kind `ANYWHERE`.
        tell: Told how it goes.

    Raises:
        ClusterError: This node has another version of ortprep.
        RegistryError: The store failed.
    """
    _check_version(cell)
    store, folder = _open(cell)
    try:
        task = _tasks(cell, store, folder)[0]
        known = store.read_receipt(ANYWHERE, FETCH)
        if known is not None:
            write_receipt(task.receipt, known)
            if not why_other(task):
                tell(Event("current", task.name))
                return Built(None, ())
            task.receipt.unlink()
        fetch_model(task, store, tell)
    except PipelineError as error:
        return Built(None, (Failure.of(error),))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Built(None, ())


def build_cell(cell: Cell, tell: Tell) -> Built:
    """Runs every stage that is not up to date, and publishes the bundle.

    Args:
        cell: What to do; the model was fetched already.
        tell: Told how it goes.

    Raises:
        ClusterError: This node has another version of ortprep.
        SpecError: It lacks what the target needs.
        RegistryError: The store failed before anything could be done.
    """
    _check_version(cell)
    _check_target(cell)
    store, folder = _open(cell)
    try:
        return _Builder(cell, store, folder, tell).build()
    finally:
        # What another run needs is in the store; a killed one leaves something here, and goes on with it.
        shutil.rmtree(folder, ignore_errors=True)


def _open(cell: Cell) -> tuple[WorkStore, Path]:
    name = str(cell.spec.data["name"])
    return WorkStore(cell.store, name), default_cache_folder().with_name("cluster") / cell.kind / name


def _tasks(cell: Cell, store: WorkStore, folder: Path) -> tuple[Task, ...]:
    """Returns the model's tasks on this node, where the files of its spec are from now on."""
    files = folder / "spec"
    shutil.rmtree(files, ignore_errors=True)
    store.fetch_files(files, cell.spec.files)
    plan = Plan(spec=place_spec(cell.spec, files), targets=(cell.target,), missing={})
    return build_tasks(plan, STAGES, folder / "artifacts")


def _check_version(cell: Cell) -> None:
    if cell.pipeline_version != pipeline.__version__:
        raise ClusterError(
            "a node has another version of ortprep\n"
            f"  expected {cell.pipeline_version}, got {pipeline.__version__}",
            hint=f"pip install 'ortprep=={cell.pipeline_version}'   # on every node",
        )


def _check_target(cell: Cell) -> None:
    reason = unavailable_reason(cell.target)
    if reason is not None:
        raise SpecError(
            f"a node of kind {cell.kind} lacks what target {cell.target} needs\n  {reason}",
            hint="ortprep doctor env   # on that node",
        )


class _Builder:
    """One cell, under way."""

    def __init__(self, cell: Cell, store: WorkStore, folder: Path, tell: Tell) -> None:
        self._cell, self._store, self._folder, self._tell = cell, store, folder, tell
        self._cache = DigestCache()
        self._uploaded = self._fetched = self._published = 0

    def build(self) -> Built:
        first, *tasks = _tasks(self._cell, self._store, self._folder)
        if self._learn(first) is None:
            raise ClusterError(f"not in the work store: {first.model}, which has to be fetched first")
        failures: list[Failure] = []
        undone: set[TaskId] = set()
        for task in tasks:
            name = self._name(task)
            if undone.intersection(task.requires):
                undone.add(task.id)
                self._tell(Event("skipped", name))
                continue
            try:
                with _told(name, self._tell):
                    self._do(task, name)
            except PipelineError as error:
                undone.add(task.id)
                failures.append(Failure.of(error))
        receipt = None if failures else self._store.read_receipt(self._cell.kind, PACKAGE)
        part = None if receipt is None else str(receipt.result[PUBLISHED]["part"])
        return Built(part, tuple(failures), (self._uploaded, self._fetched, self._published))

    def _do(self, task: Task, name: str) -> None:
        known = self._learn(task)
        if known is not None and not why_other(task) and self._is_published(task, known):
            self._tell(Event("current", name))
            return
        for required in task.requires:
            self._restore(task, required)
        run_on_device(task, cache=self._cache, say=lambda line: self._tell(Event("said", name, line)))
        receipt = read_receipt(task.receipt)
        assert receipt is not None
        if task.id == PACKAGE:
            receipt = self._publish(task, receipt)
        else:
            self._uploaded += self._store.upload_files(task.folder, receipt.files)
        self._store.write_receipt(self._cell.kind, task.id, receipt)
        self._tell(Event("finished", name))

    def _learn(self, task: Task) -> Receipt | None:
        """Takes over what the store knows of a task; of those before it that was done, and stays so."""
        known = self._store.read_receipt(ANYWHERE if task.id == FETCH else self._cell.kind, task.id)
        if known is not None and read_receipt(task.receipt) != known:
            write_receipt(task.receipt, known)
        return known

    def _restore(self, task: Task, wanted: TaskId) -> None:
        """Fetches the files that a task left, unless they are here."""
        folder = task_folder(task.artifacts, task.model, wanted)
        receipt = read_receipt(receipt_path(task.artifacts, task.model, wanted))
        if receipt is None or not receipt.files or _has_files(folder, receipt):
            return
        try:
            self._fetched += self._store.fetch_files(folder, receipt.files)
        except NotPublishedError as error:
            raise NotPublishedError(
                f"the work store has lost files of {wanted}: {error.message}",
                hint="remove the model's folder from the store, and prepare it again",
            ) from error

    def _is_published(self, task: Task, known: Receipt) -> bool:
        if task.id != PACKAGE:
            return True
        published = known.result.get(PUBLISHED, {})
        if published.get("registry") != self._cell.registry:
            return False
        with open_catalogue(self._cell.registry) as catalogue:
            return published.get("part") in catalogue.read_state(task.model).parts

    def _publish(self, task: Task, receipt: Receipt) -> Receipt:
        with open_catalogue(self._cell.registry) as catalogue:
            # Registries limit a fleet that publishes at once; hours of work are worth a minute's wait.
            published = with_retries(lambda: publish(task.folder, catalogue), attempts=PUBLISHINGS)
        self._published += published.uploaded_bytes
        where = {"registry": self._cell.registry, "part": published.part}
        return replace(receipt, result={**receipt.result, PUBLISHED: where})

    def _name(self, task: Task) -> str:
        return f"{task.name}@{self._cell.kind}"


def _has_files(folder: Path, receipt: Receipt) -> bool:
    """Says whether a task's files are here: they come into a folder all at once, and are not written to."""
    return all(
        (folder / entry.path).is_file() and (folder / entry.path).stat().st_size == entry.size_bytes
        for entry in receipt.files
    )


@contextmanager
def _told(name: str, tell: Tell) -> Iterator[None]:
    tell(Event("started", name))
    try:
        yield
    except PipelineError as error:
        tell(Event("failed", name, str(error)))
        raise


def moved(built: Sequence[Built]) -> tuple[int, int, int]:
    """Returns the sums of what cells moved, in bytes: to the work store, from it, to the registry."""
    sums = [sum(column) for column in zip(*(one.moved_bytes for one in built), strict=True)] or [0, 0, 0]
    return sums[0], sums[1], sums[2]
