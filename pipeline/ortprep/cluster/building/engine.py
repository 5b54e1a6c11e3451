"""The engine that prepares on a Ray cluster.

Ray places a job where its hardware is and holds its device for it; the driver starts it again where its node
died. All that has to outlive a node or the driver is in the work store and the registry.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ortprep.build.build_plan import read_build_specs
from ortprep.build.runner import BuildRequest, Observer
from ortprep.cluster.building.build_run import BuildRun
from ortprep.cluster.building.connection import connect
from ortprep.cluster.building.fleet_plan import plan_fleet
from ortprep.cluster.building.work_store import WorkStore
from ortprep.errors import PipelineError
from ortprep.registry.catalogue import open_catalogue
from ortprep.spec.fleet import read_fleet
from ortprep.spec.models import ModelSpec

log = logging.getLogger(__name__)

NODE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class RayEngine:
    """Ray, on a cluster or on this machine.

    Attributes:
        store: Where sources and receipts of finished models are: a path that all nodes see, or an fsspec URL.
        registry: Where they publish; None for the folder `registry` in the store.
        address: Of the cluster, as `ray.init` takes it.
        fleet: File with the kinds of hardware; None for `fleet.yaml` beside the specs.
        retries: How often a model is started again where its node or process died.
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
            SpecError: A spec or the fleet is wrong, or a target has no node; nothing was begun.
            MissingExtraError: Ray is not installed.
            ClusterError: There is no cluster.
        """
        specs = read_build_specs(request.configs, request.artifacts, names=request.names)
        fleet = read_fleet(self.fleet, configs=request.configs)
        self._check_urls(specs)
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

    def _check_urls(self, specs: Sequence[ModelSpec]) -> None:
        """Finds out now what would otherwise fail when hours of work are to be kept."""
        WorkStore(self.store_url, specs[0].name).check_writable()
        with open_catalogue(self.registry_url):
            pass

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
