"""One build on a cluster: submits jobs once their model is fetched, and collects results."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.build.build_plan import STAGES
from ortprep.build.execution import build_tasks, run_task
from ortprep.build.receipts import outcome_key, read_receipt
from ortprep.build.runner import Observer
from ortprep.bundle.digest import DigestCache, digest_json
from ortprep.cluster.building.bundle_pull import pull_merged_bundle
from ortprep.cluster.building.connection import Connection, ObjectRef
from ortprep.cluster.building.fleet_plan import FleetAssignment, FleetPlan
from ortprep.cluster.building.job import BuildJob
from ortprep.cluster.building.spec_files import ShippedSpec, describe_spec
from ortprep.cluster.building.work_store import WorkStore
from ortprep.cluster.nodes import ClusterNode
from ortprep.errors import ClusterError, PipelineError, from_dict
from ortprep.spec.fleet import Fleet
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.contract import Plan

if TYPE_CHECKING:
    from ortprep.cluster.building.engine import RayEngine

_FETCH_THREADS = 4
_POLL_INTERVAL_S = 0.1
_NODE_POLL_INTERVAL_S = 2.0


@dataclass(frozen=True)
class FetchedSource:
    """A model that nodes can start with, and the digest of its source."""

    spec: ShippedSpec
    source: str
    is_current: bool


def fetch_source(spec: ModelSpec, store_url: str, artifacts: Path, observer: Observer) -> FetchedSource:
    """Brings what the nodes need of a model into the store, by way of the driver's folder of bundles.

    Raises:
        PipelineError: The source, a file of the spec or the store fails.
    """
    store = WorkStore(store_url, spec.name)
    shipped, paths = describe_spec(spec)
    store.upload(list(zip(shipped.files, paths, strict=True)))
    task = build_tasks(Plan(spec=spec, targets=("cpu",), missing={}), STAGES, artifacts)[0]
    is_new = run_task(task, cache=DigestCache(), say=partial(observer.said, task.name))
    receipt = read_receipt(task.receipt)
    assert receipt is not None
    store.upload_files(task.folder, receipt.files)
    source = digest_json(outcome_key(receipt))
    store.write_source(source, receipt)
    return FetchedSource(shipped, source, not is_new)


class BuildRun:
    """One build, under way; `artifacts` is the driver's folder of bundles."""

    def __init__(
        self,
        cluster: Connection,
        fleet: Fleet,
        plan: FleetPlan,
        engine: RayEngine,
        artifacts: Path,
        observer: Observer,
    ) -> None:
        self._cluster, self._fleet, self._plan = cluster, fleet, plan
        self._engine, self._artifacts, self._observer = engine, artifacts, observer
        self._waiting: dict[ObjectRef, BuildJob] = {}
        self._deaths: Counter[str] = Counter()
        self._gone_since: dict[str, float] = {}
        self._parts: dict[str, list[str]] = {}
        self._errors: list[PipelineError] = []
        self._failed: set[str] = set()
        self._assignments: dict[str, list[FleetAssignment]] = {}
        for assignment in plan.assignments:
            self._assignments.setdefault(assignment.spec.name, []).append(assignment)

    def run(self) -> tuple[PipelineError, ...]:
        """Builds everything, and returns what failed; an interrupt ends what runs on the nodes."""
        try:
            self._event_loop(self._start_fetching())
            if self._engine.collect:
                self._pull_bundles()
        except BaseException:  # an interrupt too ends what runs on the nodes
            self._cluster.cancel(list(self._waiting))
            raise
        finally:
            self._observer.ended()
        return tuple(self._errors)

    def _start_fetching(self) -> dict[Future[FetchedSource], str]:
        """Has a few threads fetch the models; an interrupted program does not wait for them to end."""
        todo: queue.SimpleQueue[tuple[Future[FetchedSource], ModelSpec]] = queue.SimpleQueue()
        fetching = {}
        for name, own in self._assignments.items():
            self._observer.started(f"fetch:{name}")
            future: Future[FetchedSource] = Future()
            fetching[future] = name
            todo.put((future, own[0].spec))
        for _ in range(_FETCH_THREADS):
            threading.Thread(target=self._fetch_all, args=(todo,), daemon=True).start()
        return fetching

    def _fetch_all(self, todo: queue.SimpleQueue[tuple[Future[FetchedSource], ModelSpec]]) -> None:
        with suppress(queue.Empty):
            while True:
                future, spec = todo.get_nowait()
                try:
                    url = self._engine.store_url
                    future.set_result(fetch_source(spec, url, self._artifacts, self._observer))
                except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
                    future.set_exception(error)

    def _event_loop(self, fetching: dict[Future[FetchedSource], str]) -> None:
        """Submits a model's jobs once it is fetched, until all are done."""
        checked = time.monotonic()
        while fetching or self._waiting:
            if fetching and not self._waiting:
                wait(fetching, timeout=_POLL_INTERVAL_S, return_when=FIRST_COMPLETED)
            for future in [future for future in fetching if future.done()]:
                self._start_jobs(fetching.pop(future), future)
            for done in self._cluster.wait(list(self._waiting), _POLL_INTERVAL_S) if self._waiting else ():
                self._settle(self._waiting.pop(done), done)
            if time.monotonic() - checked >= _NODE_POLL_INTERVAL_S:
                checked = time.monotonic()
                self._give_up_without_node(self._cluster.list_nodes(), checked)

    def _start_jobs(self, model: str, future: Future[FetchedSource]) -> None:
        """Submits the jobs of a model that was fetched, one for each kind of hardware."""
        task = f"fetch:{model}"
        try:
            fetched = future.result()
        except PipelineError as error:
            self._fail(model, task, error)
            return
        (self._observer.current if fetched.is_current else self._observer.finished)(task)
        engine = self._engine
        for own in self._assignments[model]:
            job = BuildJob(
                fetched.spec, fetched.source, own.kind, own.target, engine.store_url, engine.registry_url
            )
            self._observer.started(job.name)
            self._submit(job)

    def _submit(self, job: BuildJob) -> None:
        self._waiting[self._cluster.submit(job, self._plan.reservations[job.kind])] = job

    def _settle(self, job: BuildJob, done: ObjectRef) -> None:
        """Takes a job's result, or starts it again where its node or process died."""
        try:
            result = self._cluster.collect(done)
        except ClusterError as error:
            self._deaths[job.name] += 1
            if self._deaths[job.name] <= self._engine.retries:
                self._observer.said(job.name, f"started again: {error.message}")
                self._submit(job)
            else:
                tries = f"{self._deaths[job.name]} times, the last time"
                self._fail(
                    job.model,
                    job.name,
                    ClusterError(f"{job.name}: interrupted {tries} by {error.message}", hint=error.hint),
                )
            return
        for failure in map(from_dict, result.failures):
            self._fail(job.model, job.name, failure)
        if result.part is not None:
            self._parts.setdefault(job.model, []).append(result.part)
            (self._observer.current if result.is_current else self._observer.finished)(job.name)

    def _fail(self, model: str, task: str, error: PipelineError) -> None:
        self._failed.add(model)
        self._errors.append(error)
        self._observer.failed(task, str(error))

    def _give_up_without_node(self, nodes: Sequence[ClusterNode], now_s: float) -> None:
        """Ends the jobs of kinds that no node could serve for too long."""
        for name, reservation in self._plan.reservations.items():
            if any(reservation.fits(self._fleet.hardware[name], node) for node in nodes):
                self._gone_since.pop(name, None)
            elif now_s - self._gone_since.setdefault(name, now_s) >= self._engine.node_timeout_s:
                for ref in [ref for ref, job in self._waiting.items() if job.kind == name]:
                    job = self._waiting.pop(ref)
                    self._cluster.cancel([ref])
                    error = ClusterError(
                        f"{job.name}: no node of kind {name} is left\n"
                        f"  expected one within {self._engine.node_timeout_s:g} s",
                        hint="add one and run it again: finished models are not built again",
                    )
                    self._fail(job.model, job.name, error)

    def _pull_bundles(self) -> None:
        """Pulls the merged bundles of the models that did not fail."""
        registry = self._engine.registry_url
        for name in [name for name in self._assignments if name not in self._failed]:
            task = f"pull:{name}"
            self._observer.started(task)
            try:
                is_new = pull_merged_bundle(name, self._parts[name], registry, self._artifacts / name)
            except PipelineError as error:
                self._fail(name, task, error)
            else:
                (self._observer.finished if is_new else self._observer.current)(task)
