"""One build on a cluster: submits jobs once their model is fetched, collects results, and reports."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.build.build_plan import STAGES
from ortprep.build.execution import build_tasks
from ortprep.build.runner import Observer
from ortprep.cluster.building.bundle_pull import pull_merged_bundle
from ortprep.cluster.building.connection import Connection, ObjectRef
from ortprep.cluster.building.fleet_plan import FleetAssignment, FleetPlan
from ortprep.cluster.building.job import BuildJob, Event, reported
from ortprep.cluster.building.source_fetch import fetch_model
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


FetchedSource = tuple[ShippedSpec, str]
"""A model that nodes can start with, and the digest of its source."""


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
        self._nodes: dict[str, str] = {}
        self._starts: Counter[str] = Counter()
        self._gone_since: dict[str, float] = {}
        self._parts: dict[str, list[str]] = {}
        self._errors: list[PipelineError] = []
        self._failed: set[str] = set()
        self._assignments: dict[str, list[FleetAssignment]] = {}
        for assignment in plan.assignments:
            self._assignments.setdefault(assignment.spec.name, []).append(assignment)

    def run(self) -> tuple[PipelineError, ...]:
        """Builds everything; an interrupt ends what runs on the nodes."""
        pool = ThreadPoolExecutor(_FETCH_THREADS, thread_name_prefix="ortprep-fetch")
        try:
            self._event_loop(
                {pool.submit(self._fetch, own[0].spec): name for name, own in self._assignments.items()}
            )
        except BaseException:  # an interrupt too ends what runs on the nodes
            self._cluster.cancel(list(self._waiting))
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        self._forward_events()
        if self._engine.collect:
            self._pull_bundles()
        self._observer.ended()
        return tuple(self._errors)

    def _fetch(self, spec: ModelSpec) -> FetchedSource | PipelineError:
        """Has what the nodes need of a model come into the store; runs in a thread."""
        try:
            store = WorkStore(self._engine.store_url, spec.name)
            with reported(f"fetch:{spec.name}", self._forward):
                shipped, paths = describe_spec(spec)
                store.upload(list(zip(shipped.files, paths, strict=True)))
                plan = Plan(spec=spec, targets=("cpu",), missing={})
                task = build_tasks(plan, STAGES, self._artifacts)[0]
                return shipped, fetch_model(task, store, self._forward)
        except PipelineError as error:
            return error

    def _event_loop(self, fetching: dict[Future[FetchedSource | PipelineError], str]) -> None:
        """Submits a model's jobs once it is fetched, until all are done."""
        checked = time.monotonic()
        while fetching or self._waiting:
            if fetching and not self._waiting:
                wait(fetching, timeout=_POLL_INTERVAL_S, return_when=FIRST_COMPLETED)
            for future in [future for future in fetching if future.done()]:
                name, fetched = fetching.pop(future), future.result()
                if isinstance(fetched, PipelineError):
                    self._fail(name, f"fetch:{name}", fetched, is_reported=True)
                else:
                    self._submit_assignments(*fetched)
            for done in self._cluster.wait(list(self._waiting), _POLL_INTERVAL_S) if self._waiting else ():
                self._settle(done)
            self._forward_events()
            if time.monotonic() - checked >= _NODE_POLL_INTERVAL_S:
                checked = time.monotonic()
                self._give_up_without_node(self._cluster.list_nodes(), checked)
                self._give_up_on_repeated()

    def _submit_assignments(self, shipped: ShippedSpec, source: str) -> None:
        engine = self._engine
        for assignment in self._assignments[str(shipped.data["name"])]:
            kind, target = assignment.kind, assignment.target
            job = BuildJob(shipped, source, kind, target, engine.store_url, engine.registry_url)
            self._waiting[self._cluster.submit(job, self._plan.reservations[kind])] = job

    def _settle(self, done: ObjectRef) -> None:
        job = self._waiting.pop(done)
        try:
            result = self._cluster.collect(done)
        except ClusterError as error:
            node = self._nodes.get(job.name)
            last = f" (last on node {node[:12]})" if node else ""
            self._fail(
                job.model, job.name, ClusterError(f"{job.name}{last}: {error.message}", hint=error.hint)
            )
            return
        if result.failures:
            self._failed.add(job.model)
            self._errors += map(from_dict, result.failures)
        else:
            assert result.part is not None
            self._parts.setdefault(job.model, []).append(result.part)

    def _fail(self, model: str, task: str, error: PipelineError, *, is_reported: bool = False) -> None:
        self._failed.add(model)
        self._errors.append(error)
        if not is_reported:
            self._observer.failed(task, str(error))

    def _give_up_without_node(self, nodes: Sequence[ClusterNode], now_s: float) -> None:
        """Ends the jobs of kinds that no node could serve for too long."""
        for name, reservation in self._plan.reservations.items():
            if any(reservation.fits(self._fleet.hardware[name], node) for node in nodes):
                self._gone_since.pop(name, None)
            elif now_s - self._gone_since.setdefault(name, now_s) >= self._engine.node_timeout_s:
                self._give_up(
                    [ref for ref, job in self._waiting.items() if job.kind == name],
                    f"no node of kind {name} is left\n"
                    f"  expected one within {self._engine.node_timeout_s:g} s",
                )

    def _give_up_on_repeated(self) -> None:
        """Ends the jobs that start again and again: Ray does not count those it kills for want of memory."""
        for ref, job in list(self._waiting.items()):
            if self._starts[job.name] > self._engine.retries + 1:
                self._give_up(
                    [ref],
                    f"started {self._starts[job.name]} times, and never finished\n"
                    f"  expected {self._engine.retries + 1} times at most; a node may be short of memory",
                )

    def _give_up(self, refs: Iterable[ObjectRef], why: str) -> None:
        for ref in refs:
            job = self._waiting.pop(ref)
            self._cluster.cancel([ref])
            hint = "fix that and run it again: it continues where it stopped"
            self._fail(job.model, job.name, ClusterError(f"{job.name}: {why}", hint=hint))

    def _forward_events(self) -> None:
        for event in self._cluster.take_events():
            self._forward(event)

    def _forward(self, event: Event) -> None:
        """Passes an event on to the observer."""
        task, text = event.task, event.text
        match event.what:
            case "placed":
                before = self._nodes.get(task)
                self._nodes[task] = text
                self._starts[task] += 1
                if before is not None:
                    self._observer.said(task, f"restarted on node {text[:12]}, was on {before[:12]}")
            case "said" | "logged":
                self._observer.said(task, text)
            case "failed":
                self._observer.failed(task, text)
            case "skipped":
                self._observer.skipped(task, text)
            case "started":
                self._observer.started(task)
            case "finished":
                self._observer.finished(task)
            case "current":
                self._observer.current(task)

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
