"""A driver's connection to Ray: who is there, handing out cells, and what they tell."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipeline.bundle.codec import decode, encode
from pipeline.cluster.building.cell import Built, Cell
from pipeline.cluster.building.events import Event
from pipeline.cluster.building.fleet_plan import Node, Reservation
from pipeline.cluster.building.remote import Mailbox, run_cell
from pipeline.errors import ClusterError, MissingExtraError

Ticket = Any
"""What stands for a cell that was handed out: Ray's reference to its result."""


@dataclass(frozen=True)
class Connection:
    """Ray, as a build sees it.

    Attributes:
        ray: The module, connected.
        mailbox: Handle of the actor that events are posted to.
        retries: How often a cell is begun anew where its node or process died.
    """

    ray: Any
    mailbox: Any
    retries: int

    def list_nodes(self) -> tuple[Node, ...]:
        """Returns the nodes that are alive."""
        return tuple(
            Node(one["NodeID"], one["NodeManagerAddress"], one.get("Labels") or {}, one["Resources"])
            for one in self.ray.nodes()
            if one["Alive"]
        )

    def hand_out(self, cell: Cell, wanted: Reservation) -> Ticket:
        """Has Ray run a cell on a node that fits, once there is room on one."""
        remote = self.ray.remote(run_cell).options(
            name=f"{cell.spec.data['name']}@{cell.kind}",
            num_cpus=wanted.cpus,
            num_gpus=wanted.gpus,
            resources=dict(wanted.resources),
            label_selector=dict(wanted.labels),
            max_retries=self.retries,
        )
        return remote.remote(
            json.dumps(encode(cell)), self.mailbox, logging.getLogger("pipeline").getEffectiveLevel()
        )

    def wait(self, tickets: Sequence[Ticket], timeout_s: float) -> list[Ticket]:
        """Returns those that are done, after some seconds at the latest."""
        done, _ = self.ray.wait(list(tickets), num_returns=len(tickets), timeout=timeout_s)
        return list(done)

    def collect(self, ticket: Ticket) -> Built:
        """Returns what came of a cell that is done.

        Raises:
            ClusterError: Its nodes or processes died more often than it is tried.
        """
        try:
            return decode(Built, json.loads(self.ray.get(ticket)))
        except self.ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[0]
            raise ClusterError(
                f"a build was broken off: {type(error).__name__}\n  {first}",
                hint="run it again: it goes on where it was broken off",
            ) from error

    def take_events(self) -> tuple[Event, ...]:
        """Returns what nodes have told since the last call."""
        try:
            texts = self.ray.get(self.mailbox.take.remote(), timeout=30)
        except self.ray.exceptions.RayError:
            return ()
        return tuple(decode(Event, json.loads(text)) for text in texts)

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Ends cells that are not done."""
        for ticket in tickets:
            self.ray.cancel(ticket, force=True)


@contextmanager
def connect(address: str | None, *, retries: int) -> Iterator[Connection]:
    """Yields a connection to a cluster; one that stood before is used and left standing.

    Args:
        address: As `ray.init` takes it; None for `$RAY_ADDRESS`, else a Ray of its own on this machine.
        retries: How often a cell is begun anew where its node or process died.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: There is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("Ray is not installed", hint="pip install 'ortprep[build,ray]'") from error
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where, why = address or "on this machine", str(error).splitlines()[0]
            raise ClusterError(
                f"no Ray cluster to be reached: {where}\n  {why}",
                hint="ray start --head   # and --address HOST:6379",
            ) from error
    try:
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        # The events of a build must not wait for room beside its work.
        mailbox: Any = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        try:
            yield Connection(ray, mailbox, retries)
        except ray.exceptions.RayError as error:
            why = f"{type(error).__name__}\n  {str(error).splitlines()[0]}"
            raise ClusterError(
                f"the cluster does not answer any more: {why}",
                hint="ray status   # then run it again: it goes on where it was broken off",
            ) from error
        finally:
            ray.kill(mailbox)
    finally:
        if is_ours:
            ray.shutdown()
