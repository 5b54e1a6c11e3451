"""One model on one kind of hardware: what a node is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortprep.cluster.building.spec_files import ShippedSpec


@dataclass(frozen=True)
class BuildJob:
    """What a node is to do.

    Attributes:
        spec: The model.
        source: Digest of what `fetch` left, which is built from.
        kind: Kind of hardware.
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
class JobResult:
    """What came of a job.

    Attributes:
        part: Digest of the part that is in the registry; None if something failed.
        is_current: Whether an earlier job had done all of it.
        failures: What failed, as `ortprep.errors.to_dict` gives it.
    """

    part: str | None = None
    is_current: bool = False
    failures: tuple[Mapping[str, Any], ...] = ()
