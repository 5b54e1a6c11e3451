"""The engine that prepares on a Ray cluster.

Ray places a job where its hardware is and holds its device for it; the driver starts it again where its node
died. All that has to outlive a node or the driver is in the work store and the registry.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ortprep.build.build_plan import STAGES, read_build_specs
from ortprep.build.execution import as_pipeline_errors, build_tasks, run_task
from ortprep.build.observers import BuildEvent, Observer
from ortprep.build.receipts import TaskReceipt, read_receipt
from ortprep.build.runner import BuildRequest
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.verification import check_bundle
from ortprep.cluster.building.connection import Connection, ObjectRef, connect
from ortprep.cluster.building.fleet_plan import ClusterNode, FleetPlan, plan_fleet
from ortprep.cluster.building.job import BuildJob, ShippedSpec, describe_spec
from ortprep.cluster.building.work_store import WorkStore
from ortprep.errors import BundleError, ClusterError, PipelineError, from_dict
from ortprep.quoting import quoted
from ortprep.registry.catalogue import Catalogue, open_catalogue
from ortprep.registry.pull import PullRequest, pull
from ortprep.registry.references import VersionRef
from ortprep.registry.signatures import read_receipt as read_pull_receipt
from ortprep.spec.fleet import Fleet, read_fleet
from ortprep.spec.models import ModelSpec
from ortprep.spec.urls import redact_url
from ortprep.stages.core.contract import Plan

log = logging.getLogger(__name__)

NODE_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.1
_NODE_POLL_INTERVAL_S = 2.0


@dataclass(frozen=True)
class RayEngine:
    """A Ray cluster.

    Attributes:
        store: Place of the sources' files and finished models' outcomes: a path that all nodes see, or an
            fsspec URL.
        registry: Registry of the parts; None for the folder `registry` in the store.
        address: Address of the cluster, `HOST:PORT`; None for `$RAY_ADDRESS`.
        fleet: File with the kinds of hardware; None for `fleet.yaml` beside the specs.
        retries: Number of times that a model is started again where its node or process died.
        node_timeout_s: Seconds that what is left of a kind may wait for a node of it once the last is gone.
        collect: Whether to fetch the merged bundles in the end; else they are in the registry only.
    """

    store: str
    registry: str | None = None
    address: str | None = None
    fleet: Path | None = None
    retries: int = 3
    node_timeout_s: float = NODE_TIMEOUT_S
    collect: bool = True

    def prepare(self, request: BuildRequest, observer: Observer) -> tuple[PipelineError, ...]:
        """Builds on the cluster what is not up to date, fetches the merged bundles, and returns what failed.

        Raises:
            SpecError: A spec or the fleet is wrong, a target has no node, or Ray refuses the resources of a
                kind; nothing was begun.
            ClusterError: There is no cluster.
        """
        specs = read_build_specs(request.configs, request.artifacts, names=request.names)
        fleet = read_fleet(self.fleet, configs=request.configs)
        # What would otherwise fail when hours of work are to be kept.
        WorkStore(self.store_url, specs[0].name).check_writable()
        with open_catalogue(self.registry_url):
            pass
        with connect(self.address) as cluster:
            plan = plan_fleet(
                specs,
                fleet,
                cluster.list_nodes(),
                only=request.only,
                skip_unavailable=request.skip_unavailable,
            )
            for what, why in plan.left_out.items():
                log.warning("left out: %s: %s", what, why)
            return BuildRun(cluster, fleet, plan, self, request.artifacts.absolute(), observer).run()

    @property
    def registry_url(self) -> str:
        """URL of the registry."""
        return _absolute(self.registry or f"{self.store.rstrip('/')}/registry")

    @property
    def store_url(self) -> str:
        """URL of the work store."""
        return _absolute(f"{self.store.rstrip('/')}/work")


def _absolute(url: str) -> str:
    """Nodes have other working directories than the driver."""
    return url if "://" in url else str(Path(url).expanduser().absolute())


def fetch_source(
    spec: ModelSpec, store_url: str, artifacts: Path, observer: Observer
) -> tuple[ShippedSpec, TaskReceipt]:
    """Brings what the nodes need of a model into the store, by way of the driver's folder of bundles.

    Returns:
        The spec as it travels, and the receipt of the fetched source.

    Raises:
        PipelineError: The source, a file of the spec or the store fails.
        OSError: The disk fails.
    """
    store = WorkStore(store_url, spec.name)
    shipped, folder = describe_spec(spec)
    store.upload(folder, shipped.files)
    task = build_tasks(Plan(spec=spec, targets=("cpu",), missing={}), STAGES, artifacts)[0]
    is_new = run_task(
        task, cache=DigestCache(), say=lambda line: observer(BuildEvent("said", task.name, line))
    )
    receipt = read_receipt(task.receipt)
    assert receipt is not None
    store.upload(task.folder, receipt.files)
    observer(BuildEvent("finished" if is_new else "current", task.name))
    return shipped, receipt


class BuildRun:
    """One build: fetches model after model, submits their jobs, and collects the results.

    Args:
        cluster: Connection that runs the jobs.
        fleet: The kinds of hardware.
        plan: Models by kind of hardware.
        engine: Settings of the build.
        artifacts: The driver's folder of bundles.
        observer: Takes the events.

    Raises:
        SpecError: Ray refuses the resources of a kind.
    """

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
        self._places = {
            kind: cluster.reserve(kind, reservation) for kind, reservation in plan.reservations.items()
        }
        self._specs = {one.spec.name: one.spec for one in plan.assignments}
        self._waiting: dict[ObjectRef, BuildJob] = {}
        self._deaths: Counter[str] = Counter()
        self._gone_since: dict[str, float] = {}
        self._nodes_checked_s = time.monotonic()
        self._parts: dict[str, list[str]] = {}
        self._errors: list[PipelineError] = []
        self._failed: set[str] = set()

    def run(self) -> tuple[PipelineError, ...]:
        """Builds everything, and returns what failed; an interrupt ends what runs on the nodes."""
        try:
            for spec in self._specs.values():
                self._start_jobs(spec)
                self._settle_done(0)
            while self._waiting:
                self._settle_done(_POLL_INTERVAL_S)
            if self._engine.collect:
                self._pull_bundles()
        except BaseException:  # an interrupt too ends what runs on the nodes
            self._cluster.cancel(list(self._waiting))
            raise
        finally:
            self._observer(BuildEvent("ended"))
        return tuple(self._errors)

    def _start_jobs(self, spec: ModelSpec) -> None:
        """Fetches a model, and submits its jobs, one for each kind of hardware."""
        task, store, registry = f"fetch:{spec.name}", self._engine.store_url, self._engine.registry_url
        self._observer(BuildEvent("started", task))
        try:
            with as_pipeline_errors(f"fetch of {spec.name}", str(self._artifacts)):
                shipped, source = fetch_source(spec, store, self._artifacts, self._observer)
        except PipelineError as error:
            self._fail(spec.name, task, error)
            return
        for one in (one for one in self._plan.assignments if one.spec.name == spec.name):
            job = BuildJob(shipped, source, one.kind, one.target, store, registry)
            self._observer(BuildEvent("started", job.name))
            self._submit(job)

    def _settle_done(self, timeout_s: float) -> None:
        """Takes the results that are there after so many seconds, and looks for nodes now and then."""
        for done in self._cluster.wait(list(self._waiting), timeout_s) if self._waiting else ():
            self._settle(self._waiting.pop(done), done)
        now_s = time.monotonic()
        if now_s - self._nodes_checked_s >= _NODE_POLL_INTERVAL_S:
            self._nodes_checked_s = now_s
            self._give_up_without_node(self._cluster.list_nodes(), now_s)

    def _submit(self, job: BuildJob) -> None:
        self._waiting[self._cluster.submit(job, self._places[job.kind])] = job

    def _settle(self, job: BuildJob, done: ObjectRef) -> None:
        """Takes a job's result, or starts it again where its node or process died."""
        try:
            result = self._cluster.collect(done)
        except ClusterError as error:
            self._deaths[job.name] += 1
            if self._deaths[job.name] <= self._engine.retries:
                self._observer(BuildEvent("said", job.name, f"started again: {error.message}"))
                self._submit(job)
            else:
                tries = f"{self._deaths[job.name]} times, the last time"
                text = f"{job.name}: interrupted {tries} by {error.message}"
                self._fail(job.model, job.name, ClusterError(text, hint=error.hint))
            return
        for failure in map(from_dict, result.failures):
            self._fail(job.model, job.name, failure)
        if result.part is not None:
            self._parts.setdefault(job.model, []).append(result.part)
            self._observer(BuildEvent("current" if result.is_current else "finished", job.name))

    def _fail(self, model: str, task: str, error: PipelineError) -> None:
        self._failed.add(model)
        self._errors.append(error)
        self._observer(BuildEvent("failed", task, str(error)))

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
        for name in [name for name in self._specs if name not in self._failed]:
            task = f"pull:{name}"
            self._observer(BuildEvent("started", task))
            try:
                is_new = pull_merged_bundle(name, self._parts[name], registry, self._artifacts / name)
            except PipelineError as error:
                self._fail(name, task, error)
            else:
                self._observer(BuildEvent("finished" if is_new else "current", task))


def pull_merged_bundle(name: str, parts: Sequence[str], registry: str, out: Path) -> bool:
    """Pulls what fits this machine best of the version with all parts; returns whether that was not there.

    Raises:
        ClusterError: No version has the parts.
        RegistryError: The registry failed.
    """
    with open_catalogue(registry) as catalogue:
        version = _find_version(name, parts, catalogue)
        with suppress(BundleError):
            if read_pull_receipt(out).version == version:
                check_bundle(out, DigestCache().digest)
                return False
        pull(PullRequest(VersionRef(name, version)), catalogue, out)
    return True


def _find_version(name: str, parts: Sequence[str], catalogue: Catalogue) -> str:
    """Returns the digest of the version that parts were merged into.

    It need not have all of them: of two kinds of nodes that turn out to be the same hardware, the part that
    was prepared last takes the place of the other.
    """
    state = catalogue.read_state(name)
    holders = [version for version in state.versions.values() if not version.part_digests.isdisjoint(parts)]
    merged = {state.superseded_by.get(version.digest, version.digest) for version in holders}
    published = {part for version in holders for part in version.part_digests}
    if len(merged) != 1 or not published.issuperset(parts):
        raise ClusterError(
            f"no version of {name} has the parts that its nodes published\n"
            f"  expected one of {', '.join(parts)} in {redact_url(catalogue.backend.url)}",
            hint=f"ortprep versions {quoted(name)}   # one was published or collected meanwhile",
        )
    return merged.pop()
