"""What breaks first as a fleet grows: one model's demand for each resource, and where it meets the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.fleet.bound import fewest_requests, lower_bounds
from bench.fleet.build_job import BuildJob, draw_jobs
from bench.fleet.calibration import Calibration
from bench.fleet.scenario import ARTIFACT_REGISTRY, ECR, RAY_NODES, S3, Capacities, Scenario

HISTORY = 30
"""Versions of a model that a registry keeps where one is published every day: `gc` keeps thirty days."""


@dataclass(frozen=True)
class Break:
    """One resource.

    Attributes:
        resource: Name of the resource.
        limit: Units per second.
        per_model: Units that one model takes, all kinds together.
        models_per_hour: Rate at which the limit is met.
        nodes: Machines that prepare at that rate, all kinds in equal numbers and always busy.
    """

    resource: str
    limit: float
    per_model: float
    models_per_hour: float
    nodes: float


def find_breaks(scenario: Scenario, calibration: Calibration) -> tuple[Break, ...]:
    """Returns every resource, the first to break first.

    Registries are the scenario's capacities with other limits: Amazon's and Google's for OCI, with nothing
    and with a month of daily versions there before, and S3.
    """
    jobs = draw_jobs(scenario, calibration)
    shares, models = scenario.capacities, scenario.models
    machine_s = (
        sum(
            value * kind.nodes
            for kind, value in zip(scenario.kinds, _most_of_kinds(scenario, calibration, jobs), strict=True)
        )
        / models
    )
    sources = sum(job.model.source_bytes for job in jobs) / len(scenario.kinds)
    kept = sum(job.kept_bytes for job in jobs)
    published = sum(job.publish_bytes for job in jobs)
    demands = [
        ("source, bytes", shares.source_bytes_s, sources),
        ("store, bytes", shares.store_bytes_s, sources * len(scenario.kinds) + kept),
        ("registry, bytes", shares.registry_bytes_s, published),
        ("driver, bytes: it pulls every merged bundle", shares.node_bytes_s, published),
        ("driver, tasks submitted", shares.driver_tasks_s, models + len(jobs)),
    ]
    for registry, kind, limits in (
        ("ECR", "oci", ECR),
        ("Artifact Registry", "oci", ARTIFACT_REGISTRY),
        ("S3", "s3", S3),
    ):
        for versions in (0, HISTORY):
            changed = replace(
                scenario,
                capacities=replace(shares, registry=kind, requests_s=limits),
                parts_before=versions * len(scenario.kinds),
            )
            counts = fewest_requests(changed, calibration)
            worst = max(limits, key=lambda name: counts[name] / limits[name])
            demands.append((f"{registry} {worst}, {versions} versions before", limits[worst], counts[worst]))
    breaks = [_break(name, limit, total / models, machine_s) for name, limit, total in demands]
    breaks.append(Break("nodes of a Ray cluster", 0.0, 0.0, RAY_NODES * 3600 / machine_s, RAY_NODES))
    return tuple(sorted(breaks, key=lambda one: one.nodes))


def _most_of_kinds(scenario: Scenario, calibration: Calibration, jobs: Sequence[BuildJob]) -> list[float]:
    """Returns the seconds that each kind's machines are busy, all of its machines at once."""
    bounds = lower_bounds(scenario, calibration, jobs)
    return [
        max(bounds.get(f"{what} of {kind.name}", 0.0) for what in ("machines", "devices"))
        for kind in scenario.kinds
    ]


def _break(resource: str, limit: float, per_model: float, machine_s: float) -> Break:
    models_per_s = limit / per_model
    return Break(resource, limit, per_model, models_per_s * 3600, models_per_s * machine_s)


S3_REGISTRY = Capacities(registry="s3", requests_s=S3)
