"""Assumptions: the machines, what they share, and what goes wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

GB = 1e9

ECR = {
    "PUT manifest": 10.0,
    "POST upload": 100.0,
    "PUT upload": 100.0,
    "HEAD blob": 1000.0,
    "GET manifest": 2000.0,
    "HEAD manifest": 2000.0,
}
"""Requests per second that Amazon ECR takes from an account in a region, by default (its "Service quotas":
PutImage, InitiateLayerUpload, CompleteLayerUpload, BatchCheckLayerAvailability, BatchGetImage)."""

ARTIFACT_REGISTRY = {"write": 300.0, "any": 1000.0}
"""Google's Artifact Registry, "Quotas and limits": 18,000 writes and 60,000 requests a minute."""

S3 = {"PUT": 3500.0, "DELETE": 3500.0, "GET": 5500.0, "HEAD": 5500.0}
"""Amazon S3, per prefix of a bucket ("Optimizing performance"); a prefix splits as its load grows."""

HANDED_OUT_PER_S = 355.0
"""Jobs a driver submits: what Ray's own release benchmark `many_nodes` gives on 250 nodes. Without any it
is 3,400 (`bench.fleet.submission`, two cores, 5,000 jobs)."""

RAY_NODES = 250
"""Nodes of a cluster that Ray's scalability envelope promises (`release/benchmarks/README.md`)."""

META_MTBF_H = 2048 * 54 * 24 / 419
"""Hours between failures of a node of eight GPUs: Llama 3's 419 in 54 days on 2,048 nodes."""

SPOT_MTBF_H = -730 / math.log(1 - 0.2)
"""Hours between reclaims of a spot node where a fifth goes in a month: Amazon's worst class."""


@dataclass(frozen=True)
class Kind:
    """One kind of hardware.

    Attributes:
        name: Name of the kind.
        nodes: Number of machines.
        devices: Devices of each machine, and so concurrent jobs. All processors are one device.
        slowness: Factor on the measured times of all stages.
    """

    name: str
    nodes: int
    devices: int = 1
    slowness: float = 1.0


FLEET = (
    Kind("x86-avx512", 12),
    Kind("arm64", 12),
    Kind("l4", 12),
    Kind("a10g", 10),
    Kind("h100", 4, devices=8),
)
"""Fifty machines of five kinds, the dearest the scarcest."""


@dataclass(frozen=True)
class Capacities:
    """What all machines share.

    Attributes:
        source_bytes_s: What the place that models come from sends.
        store_bytes_s: What the store of intermediate files takes and sends.
        registry_bytes_s: What the registry takes.
        node_bytes_s: What the network of one machine carries.
        driver_tasks_s: Tasks that the driver submits per second.
        registry: Kind of registry, as the calibration has it.
        requests_s: Requests it takes, by kind; `write` and `any` stand for all of those. None has no limit.
    """

    source_bytes_s: float = 1.25 * GB
    store_bytes_s: float = 5 * GB
    registry_bytes_s: float = 1.25 * GB
    node_bytes_s: float = 1.25 * GB
    driver_tasks_s: float = HANDED_OUT_PER_S
    registry: str = "oci"
    requests_s: Mapping[str, float] = field(default_factory=lambda: ECR)


@dataclass(frozen=True)
class Failures:
    """What goes wrong, at random.

    Attributes:
        node_mtbf_h: Hours between the deaths of one node, failures and reclaims together.
        replacement_s: Time until another machine takes its place, in seconds.
        driver_mtbf_h: Hours between deaths of the driver.
        restart_s: Time until somebody runs the command again, in seconds.
        transfer_error: Share of transfers to and from the store that fail half-way and are repeated.
        retry_s: Delay before the repetition, in seconds.
    """

    node_mtbf_h: float = math.inf
    replacement_s: float = 300.0
    driver_mtbf_h: float = math.inf
    restart_s: float = 120.0
    transfer_error: float = 0.0
    retry_s: float = 1.0


NONE = Failures()
USUAL = Failures(node_mtbf_h=1 / (1 / META_MTBF_H + 1 / SPOT_MTBF_H), driver_mtbf_h=168, transfer_error=1e-4)
HARSH = Failures(node_mtbf_h=12, driver_mtbf_h=4, transfer_error=0.01)
HOSTILE = Failures(node_mtbf_h=1, driver_mtbf_h=1, transfer_error=0.05)


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        kinds: The machines.
        models: Models to prepare, each for every kind.
        capacities: What is shared.
        failures: What goes wrong.
        is_alone: Whether a measurement has its machine alone (as builds do today), or its device only.
        largest_first: Whether the largest models go first, or all in the order of their names.
        parts_before: Parts of each model that the registry has from earlier versions.
        seed: Seed of all random numbers.
    """

    kinds: tuple[Kind, ...] = FLEET
    models: int = 1000
    capacities: Capacities = Capacities()
    failures: Failures = NONE
    is_alone: bool = True
    largest_first: bool = False
    parts_before: int = 0
    seed: int = 1
