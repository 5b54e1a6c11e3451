"""The engine that prepares on a Ray cluster: hands out cells, tells how they go, and fetches the bundles.

Ray places a cell where its hardware is, holds its device for it, and begins it anew elsewhere when its node
dies. All that has to outlive a node or the driver is in the work store and the registry.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import pipeline
from pipeline.cluster.building.cell import ANYWHERE, Built, Cell, fetch_model, moved
from pipeline.cluster.building.collecting import collect_bundle
from pipeline.cluster.building.connection import Connection, Ticket, connect
from pipeline.cluster.building.events import Event
from pipeline.cluster.building.fleet_plan import FleetPlan, Node, Reservation, Share, plan_fleet, reserve
from pipeline.cluster.building.spec_files import ShippedSpec, describe_spec, find_root
from pipeline.cluster.building.work_store import WorkStore
from pipeline.errors import ClusterError, PipelineError
from pipeline.graph.build import STAGES, read_build_specs
from pipeline.graph.engine import Order, Outcome
from pipeline.graph.execution import build_tasks
from pipeline.graph.observer import Observer
from pipeline.spec.fleet import Fleet, read_fleet
from pipeline.spec.models import ModelSpec
from pipeline.stages.contract import Plan
from pipeline.stages.fetch.stage import local_source

log = logging.getLogger(__name__)

_FETCHERS = 4
_POLL_S = 0.1
_LOOK_S = 2.0
_ANY_NODE = Reservation(cpus=1.0, gpus=0.0, labels={}, resources={})


@dataclass(frozen=True)
class RayEngine:
    """Ray, on a cluster or on this machine.

    Attributes:
        store: Where nodes keep what they have done: a path that all of them see, or an fsspec URL.
        registry: Where they publish; None for the folder `registry` in the store.
        address: Of the cluster, as `ray.init` takes it.
        fleet: File with the kinds of hardware; None for `fleet.yaml` beside the specs.
        retries: How often a model is begun anew where its node or process died.
        node_timeout_s: Seconds that what is left of a kind may wait for a node of it once the last is gone.
        collect: Whether to fetch the merged bundles in the end; else they are in the registry only.
    """

    store: str
    registry: str | None = None
    address: str | None = None
    fleet: Path | None = None
    retries: int = 3
    node_timeout_s: float = 600.0
    collect: bool = True

    def prepare(self, order: Order, observer: Observer) -> Outcome:
        """Builds on the cluster what is not up to date, and fetches the merged bundles.

        Raises:
            SpecError: A spec or the fleet is wrong, or a target has no node; nothing was begun.
            MissingExtraError: Ray is not installed.
            ClusterError: There is no cluster.
        """
        specs = read_build_specs(order.configs, order.artifacts, names=order.names)
        fleet = read_fleet(self.fleet, configs=order.configs)
        with connect(self.address, retries=self.retries) as cluster:
            plan = plan_fleet(
                specs,
                fleet,
                cluster.list_nodes(),
                only=order.only,
                skip_unavailable=order.skip_unavailable,
            )
            for what, why in plan.left_out.items():
                log.warning("left out: %s: %s", what, why)
            return _Run(self, cluster, fleet, plan, order, observer).run()

    @property
    def published_to(self) -> str:
        """URL of the registry."""
        return self.registry or f"{_absolute(self.store).rstrip('/')}/registry"

    @property
    def worked_in(self) -> str:
        """URL of the work store."""
        return f"{_absolute(self.store).rstrip('/')}/work"


def _absolute(url: str) -> str:
    """Nodes have other working directories than the driver."""
    return url if "://" in url else str(Path(url).expanduser().absolute())


@dataclass
class _Run:
    """One order, under way."""

    engine: RayEngine
    cluster: Connection
    fleet: Fleet
    plan: FleetPlan
    order: Order
    observer: Observer
    waiting: dict[Ticket, Cell] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    parts: dict[str, list[str]] = field(default_factory=dict)
    built: list[Built] = field(default_factory=list)
    errors: list[PipelineError] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def run(self) -> Outcome:
        specs = {share.spec.name: share.spec for share in self.plan.shares}
        shares = {name: [one for one in self.plan.shares if one.spec.name == name] for name in specs}
        try:
            with ThreadPoolExecutor(_FETCHERS, thread_name_prefix="ortprep-fetch") as pool:
                fetching = {pool.submit(self._fetch, spec): spec.name for spec in specs.values()}
                try:
                    self._attend(fetching, shares)
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        except KeyboardInterrupt:
            self.cluster.cancel(list(self.waiting))
            raise
        self._tell()
        if self.engine.collect:
            self._collect(shares)
        self.observer.ended()
        sent, taken, published = moved(self.built)
        log.info("moved: %d bytes to the store, %d from it, %d to the registry", sent, taken, published)
        return Outcome(not self.errors, tuple(self.errors))

    def _fetch(self, spec: ModelSpec) -> ShippedSpec | PipelineError:
        """Has what the nodes need of a model come into the store; runs in a thread."""
        try:
            shipped = describe_spec(spec)
            store = WorkStore(self.engine.worked_in, spec.name)
            store.upload_files(find_root(spec), shipped.files)
            if local_source(spec) is not None:
                plan = Plan(spec=spec, targets=("cpu",), missing={})
                fetch_model(build_tasks(plan, STAGES, self.order.artifacts.absolute())[0], store, self._take)
        except PipelineError as error:
            return error
        return shipped

    def _attend(
        self, fetching: dict[Future[ShippedSpec | PipelineError], str], shares: Mapping[str, Sequence[Share]]
    ) -> None:
        """Hands out a model's cells once it is fetched, until all is done."""
        looked = gone_since = time.monotonic()
        while fetching or self.waiting:
            if fetching and not self.waiting:
                wait(fetching, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in [one for one in fetching if one.done()]:
                name = fetching.pop(future)
                shipped = future.result()
                if isinstance(shipped, PipelineError):
                    self._fail(name, shipped)
                else:
                    self._hand_out(shipped, shares[name])
            for ticket in self.cluster.wait(list(self.waiting), _POLL_S) if self.waiting else ():
                self._settle(ticket, shares)
            self._tell()
            if time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                gone = self._cells_without_node(self.cluster.list_nodes())
                gone_since = gone_since if gone else looked
                if looked - gone_since >= self.engine.node_timeout_s:
                    self._give_up(gone)

    def _hand_out(self, shipped: ShippedSpec, shares: Sequence[Share]) -> None:
        name = shares[0].spec.name
        if local_source(shares[0].spec) is None:
            # Any node can read it: its cells follow when one has.
            cell = self._cell(shipped, ANYWHERE, "cpu")
            self.waiting[self.cluster.hand_out(cell, _ANY_NODE)] = cell
            return
        self._hand_out_shares(shipped, shares)
        log.debug("%s was handed out to %d kinds of hardware", name, len(shares))

    def _hand_out_shares(self, shipped: ShippedSpec, shares: Sequence[Share]) -> None:
        nodes = self.cluster.list_nodes()
        for share in shares:
            cell = self._cell(shipped, share.kind, share.target)
            wanted = reserve(self.fleet.hardware[share.kind], nodes)
            self.waiting[self.cluster.hand_out(cell, wanted)] = cell

    def _cell(self, shipped: ShippedSpec, kind: str, target: str) -> Cell:
        return Cell(
            spec=shipped,
            kind=kind,
            target=target,
            store=self.engine.worked_in,
            registry=self.engine.published_to,
            pipeline_version=pipeline.__version__,
        )

    def _settle(self, ticket: Ticket, shares: Mapping[str, Sequence[Share]]) -> None:
        cell = self.waiting.pop(ticket)
        name = str(cell.spec.data["name"])
        try:
            built = self.cluster.collect(ticket)
        except ClusterError as error:
            where = f"{name}@{cell.kind}"
            self._fail(
                name, ClusterError(f"{where}{self._describe_place(where)}: {error.message}", hint=error.hint)
            )
            return
        self.built.append(built)
        if built.failures:
            self.failed.add(name)
            self.errors += [failure.to_error() for failure in built.failures]
        elif cell.kind == ANYWHERE:
            self._hand_out_shares(cell.spec, shares[name])
        elif built.part is not None:
            self.parts.setdefault(name, []).append(built.part)

    def _describe_place(self, where: str) -> str:
        place = self.places.get(where)
        return f" (last on node {place[:12]})" if place else ""

    def _fail(self, name: str, error: PipelineError) -> None:
        self.failed.add(name)
        self.errors.append(error)
        self.observer.failed(name, str(error))

    def _cells_without_node(self, nodes: Sequence[Node]) -> list[Ticket]:
        """Returns the cells that no node that is alive could run."""
        lacking = {
            name
            for name, kind in self.fleet.hardware.items()
            if not any(kind.fits(node.labels, node.resources) for node in nodes)
        }
        return [ticket for ticket, cell in self.waiting.items() if cell.kind in lacking]

    def _give_up(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            cell = self.waiting.pop(ticket)
            self.cluster.cancel([ticket])
            name = str(cell.spec.data["name"])
            self._fail(
                name,
                ClusterError(
                    f"no node of kind {cell.kind} is left for {name}\n"
                    f"  expected one within {self.engine.node_timeout_s:g} s",
                    hint="ortprep prepare again once there is one: it goes on where it was broken off",
                ),
            )

    def _tell(self) -> None:
        for event in self.cluster.take_events():
            self._take(event)

    def _take(self, event: Event) -> None:
        """Passes an event on to the observer."""
        if event.what == "placed":
            before = self.places.get(event.task)
            self.places[event.task] = event.text
            if before is not None:
                self.observer.said(event.task, f"begun anew on node {event.text[:12]}, was on {before[:12]}")
        elif event.what == "logged":
            self.observer.said(event.task, event.text)
        elif event.what in ("said", "failed", "skipped"):
            getattr(self.observer, event.what)(event.task, event.text)
        else:
            getattr(self.observer, event.what)(event.task)

    def _collect(self, shares: Mapping[str, Sequence[Share]]) -> None:
        """Fetches the merged bundles of the models of which nothing failed."""
        for name in shares:
            if name in self.failed:
                continue
            task = f"pull:{name}"
            self.observer.started(task)
            try:
                is_new = collect_bundle(
                    name, self.parts[name], self.engine.published_to, self.order.artifacts.absolute() / name
                )
            except PipelineError as error:
                self._fail(task, error)
            else:
                (self.observer.finished if is_new else self.observer.current)(task)
