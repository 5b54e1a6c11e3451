"""One model on one kind of hardware: what a node is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.bundle.digest import digest_json
from pipeline.cluster.building.events import Failure
from pipeline.cluster.building.spec_files import ShippedSpec
from pipeline.graph.receipts import Receipt, outcome_key
from pipeline.spec.fleet import ANYWHERE
from pipeline.stages.contract import TaskId

__all__ = ["ANYWHERE", "FETCH", "Built", "Cell", "Moved", "digest_outcome", "sum_moved"]

FETCH = TaskId("fetch")
PACKAGE = TaskId("package")


@dataclass(frozen=True)
class Cell:
    """What a node is to do.

    Attributes:
        spec: The model.
        source: Digest of what `fetch` left, which is built from; "" for a cell that is to fetch.
        kind: Kind of hardware; `ANYWHERE` for a cell that is to fetch.
        target: What is prepared for: `cpu` or `cuda`.
        store: URL of the work store.
        registry: URL of the registry.
    """

    spec: ShippedSpec
    source: str
    kind: str
    target: str
    store: str
    registry: str

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.spec.data["name"])

    @property
    def name(self) -> str:
        """As people see it."""
        return f"{self.model}@{self.kind}"


@dataclass(frozen=True)
class Moved:
    """Bytes that went from one machine to another.

    Attributes:
        stored: To the work store.
        fetched: From it.
        published: To the registry.
    """

    stored: int = 0
    fetched: int = 0
    published: int = 0


@dataclass(frozen=True)
class Built:
    """What came of a cell.

    Attributes:
        part: Digest of the part that was published; None if something failed, or none was to be.
        source: Digest of what was fetched; None if something failed, or nothing was to be.
        failures: What failed.
        moved: What went over the network.
    """

    part: str | None = None
    source: str | None = None
    failures: tuple[Failure, ...] = ()
    moved: Moved = Moved()


def digest_outcome(receipt: Receipt) -> str:
    """Returns the digest of what later tasks' keys say about one that is done."""
    return digest_json(outcome_key(receipt))


def sum_moved(built: Sequence[Built]) -> Moved:
    """Returns what cells moved together."""
    return Moved(
        stored=sum(one.moved.stored for one in built),
        fetched=sum(one.moved.fetched for one in built),
        published=sum(one.moved.published for one in built),
    )
