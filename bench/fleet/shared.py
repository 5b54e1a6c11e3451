"""Resources that all machines share, and their traffic: the source, the store, the registry, the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from bench.fleet.build_job import Model
from bench.fleet.calibration import Calibration, RequestCost
from bench.fleet.outcome import Waste
from bench.fleet.pipe import Pipe
from bench.fleet.scenario import Failures, Scenario
from ortprep.cluster.building.job_build import MAX_PUBLISH_ATTEMPTS
from ortprep.registry.retries import ATTEMPTS, FIRST_PAUSE_S


def _pauses_s(attempts: int) -> float:
    return sum(FIRST_PAUSE_S * 2.0**number for number in range(attempts - 1))


PATIENCE_S = MAX_PUBLISH_ATTEMPTS * _pauses_s(ATTEMPTS) + _pauses_s(MAX_PUBLISH_ATTEMPTS)
"""Seconds for which a job asks again, jitter apart, before it gives up: its registry's backend each time."""

_READS = ("GET", "HEAD", "list_", "read_", "find_")


def groups_of(kind: str) -> tuple[str, ...]:
    """Returns the limits that a kind of request counts against."""
    return (kind, "any") if kind.startswith(_READS) else (kind, "write", "any")


@dataclass
class Registry:
    """A registry with limits to its requests.

    Attributes:
        costs: Requests of a publish.
        limits: The pipes they go through.
        bytes: The pipe that files go through.
        floor_s: Seconds a publish takes in any case.
        sent: Requests so far, by kind.
        offered: When a publish began, and how many requests it makes.
        impatient: Publishes that waited at a limit for longer than they retry: they would have failed.
    """

    costs: Mapping[str, RequestCost]
    limits: Mapping[str, Pipe]
    bytes: Pipe
    floor_s: float
    sent: dict[str, float] = field(default_factory=dict)
    offered: list[tuple[float, float]] = field(default_factory=list)
    impatient: int = 0

    def publish(self, now_s: float, model: Model, size_bytes: float) -> float:
        """Sends what a publish sends, and returns when the registry has answered the last of it.

        A publisher of a model that others publish at the same time also pays for their repeated requests.
        """
        end_s = max(now_s + self.floor_s, self.bytes.take(now_s, size_bytes))
        queue_s = max((pipe.free_at_s - now_s for pipe in self.limits.values()), default=0.0)
        total = 0.0
        for kind, cost in self.costs.items():
            count = cost.base + cost.per_part * model.parts + cost.per_rival * model.publishing
            self.sent[kind] = self.sent.get(kind, 0.0) + count
            total += count
            for group in groups_of(kind):
                if group in self.limits:
                    end_s = max(end_s, self.limits[group].take(now_s, count))
        self.offered.append((now_s, total))
        self.impatient += queue_s > PATIENCE_S
        return end_s


@dataclass
class Store:
    """The content-addressed store of stages' files.

    Attributes:
        pipe: What it takes and sends.
        node_bytes_s: What one machine's network carries.
        failures: Rates of failing transfers.
        waste: Record of repeated transfers.
        bytes: Moved bytes, by direction.
        requests: Two for each file (is it there; put or get it), two for a receipt.
    """

    pipe: Pipe
    node_bytes_s: float
    failures: Failures
    waste: Waste
    bytes: dict[str, float] = field(default_factory=dict)
    requests: int = 0

    def move(self, way: str, now_s: float, size_bytes: float, files: int, random: Random) -> float:
        """Moves files there (`stored`) or back (`loaded`), again after an error; returns the seconds."""
        at_s = now_s
        self.requests += 2 * files + 2
        while self.failures.transfer_error and random.random() < self.failures.transfer_error:
            at_s = self._take(way, at_s, size_bytes / 2) + self.failures.retry_s
            self.requests += files
            self.waste.bytes += size_bytes / 2
            self.waste.transfer_errors += 1
        return self._take(way, at_s, size_bytes) - now_s

    def _take(self, way: str, at_s: float, size_bytes: float) -> float:
        self.bytes[way] = self.bytes.get(way, 0.0) + size_bytes
        return max(self.pipe.take(at_s, size_bytes), at_s + size_bytes / self.node_bytes_s)


@dataclass
class Shared:
    """Everything that machines share.

    Attributes:
        source: Where models come from.
        store: Where intermediate files are.
        driver: Submits tasks.
        registry: Where bundles go.
    """

    source: Pipe
    store: Store
    driver: Pipe
    registry: Registry

    def fetch(self, now_s: float, size_bytes: float) -> float:
        """Fetches a model from its source; returns the seconds."""
        through_s = now_s + size_bytes / self.store.node_bytes_s
        return max(self.source.take(now_s, size_bytes), through_s) - now_s


def open_shared(scenario: Scenario, calibration: Calibration, waste: Waste) -> Shared:
    """Returns all shared resources, idle."""
    capacities = scenario.capacities
    registry = Registry(
        calibration.registries[capacities.registry],
        {name: Pipe(rate) for name, rate in capacities.requests_s.items()},
        Pipe(capacities.registry_bytes_s),
        calibration.publish_floor_s,
    )
    store = Store(Pipe(capacities.store_bytes_s), capacities.node_bytes_s, scenario.failures, waste)
    return Shared(Pipe(capacities.source_bytes_s), store, Pipe(capacities.driver_tasks_s), registry)
