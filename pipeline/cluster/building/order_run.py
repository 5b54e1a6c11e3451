"""One order on a cluster: what is fetched is handed out, what is done is collected, and all is told."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.building.cell import ANYWHERE, Built, Cell, sum_moved
from pipeline.cluster.building.collecting import collect_bundle
from pipeline.cluster.building.connection import Connection, Ticket
from pipeline.cluster.building.events import Event
from pipeline.cluster.building.fetching import fetch_model
from pipeline.cluster.building.fleet_plan import FleetPlan, Node, Reservation, Share
from pipeline.cluster.building.spec_files import ShippedSpec, describe_spec
from pipeline.cluster.building.work_store import WorkStore
from pipeline.errors import ClusterError, PipelineError
from pipeline.graph.build import STAGES
from pipeline.graph.engine import Outcome
from pipeline.graph.execution import build_tasks
from pipeline.graph.observer import Observer
from pipeline.spec.fleet import Fleet
from pipeline.spec.models import ModelSpec
from pipeline.stages.contract import Plan
from pipeline.stages.fetch.stage import local_source

log = logging.getLogger(__name__)

_FETCHERS = 4
_POLL_S = 0.1
_LOOK_S = 2.0
_ANY_NODE = Reservation(cpus=1.0, gpus=0.0, labels={}, resources={})


@dataclass(frozen=True)
class Places:
    """Where a build's files are.

    Attributes:
        store: URL of the work store.
        registry: URL of the registry.
        artifacts: The driver's folder of bundles.
    """

    store: str
    registry: str
    artifacts: Path


@dataclass(frozen=True)
class _Fetched:
    """A model that nodes can begin with; without a source, one of them has to fetch it first."""

    shipped: ShippedSpec
    source: str | None


class OrderRun:
    """One order, under way.

    Args:
        cluster: Where.
        fleet: Kinds of hardware.
        plan: What is prepared where.
        places: Where files are.
        observer: Told how it goes.
        begun_at_most: How often a cell may begin, whatever ends it.
        node_timeout_s: Seconds to wait for a node of a kind whose last is gone.
        collect: Whether to fetch the merged bundles.
    """

    def __init__(
        self,
        cluster: Connection,
        fleet: Fleet,
        plan: FleetPlan,
        places: Places,
        observer: Observer,
        *,
        begun_at_most: int,
        node_timeout_s: float,
        collect: bool,
    ) -> None:
        self._cluster, self._fleet, self._plan, self._places = cluster, fleet, plan, places
        self._observer, self._begun_at_most = observer, begun_at_most
        self._node_timeout_s, self._is_collecting = node_timeout_s, collect
        self._waiting: dict[Ticket, Cell] = {}
        self._nodes: dict[str, str] = {}
        self._begun: Counter[str] = Counter()
        self._gone_since: dict[str, float] = {}
        self._parts: dict[str, list[str]] = {}
        self._built: list[Built] = []
        self._errors: list[PipelineError] = []
        self._failed: set[str] = set()
        self._shares: dict[str, list[Share]] = {}
        for share in plan.shares:
            self._shares.setdefault(share.spec.name, []).append(share)

    def run(self) -> Outcome:
        """Does it; an interrupt ends what runs on the nodes.

        Raises:
            RayError: The cluster is lost.
        """
        pool = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="ortprep-fetch")
        try:
            fetching = {pool.submit(self._fetch, own[0].spec): name for name, own in self._shares.items()}
            self._attend(fetching)
        except BaseException:
            self._cluster.cancel(list(self._waiting))
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        self._tell()
        if self._is_collecting:
            self._collect()
        self._observer.ended()
        moved = sum_moved(self._built)
        log.info(
            "moved %d bytes to the store, %d from it, %d to the registry",
            moved.stored,
            moved.fetched,
            moved.published,
        )
        return Outcome(not self._errors, tuple(self._errors))

    def _fetch(self, spec: ModelSpec) -> _Fetched | PipelineError:
        """Has what the nodes need of a model come into the store; runs in a thread."""
        try:
            store = WorkStore(self._places.store, spec.name)
            try:
                shipped, paths = describe_spec(spec)
                store.upload(list(zip(shipped.files, paths, strict=True)))
                is_local = local_source(spec) is not None
            except PipelineError as error:
                self._take(Event("failed", f"fetch:{spec.name}", str(error)))
                raise
            if not is_local:
                return _Fetched(shipped, None)
            plan = Plan(spec=spec, targets=("cpu",), missing={})
            first = build_tasks(plan, STAGES, self._places.artifacts)[0]
            source, _ = fetch_model(first, store, self._take)
        except PipelineError as error:
            return error
        return _Fetched(shipped, source)

    def _attend(self, fetching: dict[Future[_Fetched | PipelineError], str]) -> None:
        """Hands out a model's cells once it is fetched, until all is done."""
        looked = time.monotonic()
        while fetching or self._waiting:
            if fetching and not self._waiting:
                wait(fetching, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in [one for one in fetching if one.done()]:
                name, fetched = fetching.pop(future), future.result()
                if isinstance(fetched, PipelineError):
                    self._fail(name, f"fetch:{name}", fetched, is_told=True)
                elif fetched.source is None:
                    self._hand_out(self._cell(fetched.shipped, "", ANYWHERE, "cpu"), _ANY_NODE)
                else:
                    self._hand_out_shares(fetched.shipped, fetched.source)
            for ticket in self._cluster.wait(list(self._waiting), _POLL_S) if self._waiting else ():
                self._settle(ticket)
            self._tell()
            if time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                self._give_up_without_node(self._cluster.list_nodes(), looked)
                self._give_up_on_repeated()

    def _hand_out(self, cell: Cell, wanted: Reservation) -> None:
        self._waiting[self._cluster.hand_out(cell, wanted)] = cell

    def _hand_out_shares(self, shipped: ShippedSpec, source: str) -> None:
        for share in self._shares[str(shipped.data["name"])]:
            cell = self._cell(shipped, source, share.kind, share.target)
            self._hand_out(cell, self._plan.reservations[share.kind])

    def _cell(self, shipped: ShippedSpec, source: str, kind: str, target: str) -> Cell:
        return Cell(shipped, source, kind, target, self._places.store, self._places.registry)

    def _settle(self, ticket: Ticket) -> None:
        cell = self._waiting.pop(ticket)
        try:
            built = self._cluster.collect(ticket)
        except ClusterError as error:
            node = self._nodes.get(cell.name)
            last = f" (last on node {node[:12]})" if node else ""
            told = ClusterError(f"{cell.name}{last}: {error.message}", hint=error.hint)
            self._fail(cell.model, cell.name, told)
            return
        self._built.append(built)
        if built.failures:
            self._failed.add(cell.model)
            self._errors += [failure.to_error() for failure in built.failures]
        elif cell.kind == ANYWHERE and built.source is not None:
            self._hand_out_shares(cell.spec, built.source)
        elif built.part is not None:
            self._parts.setdefault(cell.model, []).append(built.part)
        else:
            self._fail(cell.model, cell.name, ClusterError(f"{cell.name}: nothing came of it"))

    def _fail(self, model: str, task: str, error: PipelineError, *, is_told: bool = False) -> None:
        self._failed.add(model)
        self._errors.append(error)
        if not is_told:
            self._observer.failed(task, str(error))

    def _give_up_without_node(self, nodes: Sequence[Node], now_s: float) -> None:
        """Ends the cells of kinds that no node could serve for too long."""
        for name, wanted in self._plan.reservations.items():
            if any(wanted.fits(self._fleet.hardware[name], node) for node in nodes):
                self._gone_since.pop(name, None)
            elif now_s - self._gone_since.setdefault(name, now_s) >= self._node_timeout_s:
                self._give_up(
                    [ticket for ticket, cell in self._waiting.items() if cell.kind == name],
                    f"no node of kind {name} is left\n  expected one within {self._node_timeout_s:g} s",
                )

    def _give_up_on_repeated(self) -> None:
        """Ends the cells that begin again and again: Ray does not count those it kills for want of memory."""
        for ticket, cell in list(self._waiting.items()):
            if self._begun[cell.name] > self._begun_at_most:
                self._give_up(
                    [ticket],
                    f"begun {self._begun[cell.name]} times, and never done\n"
                    f"  expected {self._begun_at_most} times at most; a node may lack the memory",
                )

    def _give_up(self, tickets: Iterable[Ticket], why: str) -> None:
        for ticket in tickets:
            cell = self._waiting.pop(ticket)
            self._cluster.cancel([ticket])
            hint = "run it again once that is mended: it goes on where it was broken off"
            self._fail(cell.model, cell.name, ClusterError(f"{cell.name}: {why}", hint=hint))

    def _tell(self) -> None:
        for event in self._cluster.take_events():
            self._take(event)

    def _take(self, event: Event) -> None:
        """Passes an event on to the observer."""
        if event.what == "placed":
            before = self._nodes.get(event.task)
            self._nodes[event.task] = event.text
            self._begun[event.task] += 1
            if before is not None:
                line = f"begun anew on node {event.text[:12]}, was on {before[:12]}"
                self._observer.said(event.task, line)
        elif event.what == "logged":
            self._observer.said(event.task, event.text)
        elif event.what in ("said", "failed", "skipped"):
            getattr(self._observer, event.what)(event.task, event.text)
        else:
            getattr(self._observer, event.what)(event.task)

    def _collect(self) -> None:
        """Fetches the merged bundles of the models of which nothing failed."""
        for name in [one for one in self._shares if one not in self._failed]:
            task = f"pull:{name}"
            self._observer.started(task)
            try:
                is_new = collect_bundle(
                    name, self._parts[name], self._places.registry, self._places.artifacts / name
                )
            except PipelineError as error:
                self._fail(name, task, error)
            else:
                (self._observer.finished if is_new else self._observer.current)(task)
