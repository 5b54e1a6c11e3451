"""Lower bounds of the makespan: no schedule can be faster."""

from __future__ import annotations

from collections.abc import Sequence

from bench.fleet.build_job import BuildJob
from bench.fleet.calibration import Calibration
from bench.fleet.scenario import Kind, Scenario
from bench.fleet.shared import groups_of


def lower_bounds(scenario: Scenario, calibration: Calibration, jobs: Sequence[BuildJob]) -> dict[str, float]:
    """Returns seconds that no schedule can beat, by what forces them; the largest is the bound.

    - `machines of KIND`: on a machine one stage measures at a time, the others run in as many jobs as it
      has devices, so the exclusive seconds plus the shared ones over the devices, over the kind's machines.
    - `devices of KIND`: seconds that its jobs hold a device, from the loading of the source to the last byte
      published, over all its devices.
    - `longest chain`: of a model's fetch and one of its jobs, with every network to itself.
    - `source`, `store`, `registry bytes`: bytes that must move, over what the place carries. The store gets
      each source and each new file once, and gives the source to each kind.
    - `requests: KIND`: those of publishes one after the other, over the limit.
    - `driver`: tasks over what it submits in a second.
    """
    shares = scenario.capacities
    sources = {job.model.index: job.model.source_bytes for job in jobs}
    published = sum(job.publish_bytes for job in jobs)
    moved = sum(sources.values()) * (1 + len(scenario.kinds)) + sum(job.kept_bytes for job in jobs)
    tasks = len(sources) + len(jobs)
    bounds = {}
    for number, kind in enumerate(scenario.kinds):
        own = [job for job in jobs if job.kind == number]
        held_s = sum(_held(scenario, calibration, job) for job in own)
        bounds[f"devices of {kind.name}"] = held_s / (kind.nodes * kind.devices)
        if scenario.is_alone:
            bounds[f"machines of {kind.name}"] = machine_seconds(own, kind) / kind.nodes
    bounds["longest chain"] = max(_chain(scenario, calibration, job) for job in jobs)
    bounds["source"] = sum(sources.values()) / shares.source_bytes_s
    bounds["store"] = moved / shares.store_bytes_s
    bounds["registry bytes"] = published / shares.registry_bytes_s
    bounds["driver"] = tasks / shares.driver_tasks_s
    for name, count in fewest_requests(scenario, calibration).items():
        bounds[f"requests: {name}"] = count / shares.requests_s[name]
    return bounds


def machine_seconds(jobs: Sequence[BuildJob], kind: Kind) -> float:
    """Returns the minimum seconds of a machine that some jobs take if measurements have it to themselves."""
    stages = [stage for job in jobs for stage in job.stages]
    return sum(stage.seconds if stage.is_exclusive else stage.seconds / kind.devices for stage in stages)


def _held(scenario: Scenario, calibration: Calibration, job: BuildJob) -> float:
    shares = scenario.capacities
    moved_s = (job.model.source_bytes + job.kept_bytes) / min(shares.node_bytes_s, shares.store_bytes_s)
    published_s = job.publish_bytes / min(shares.registry_bytes_s, shares.node_bytes_s)
    run_s = sum(stage.seconds for stage in job.stages)
    return moved_s + run_s + max(published_s, calibration.publish_floor_s)


def _chain(scenario: Scenario, calibration: Calibration, job: BuildJob) -> float:
    shares, size_bytes = scenario.capacities, job.model.source_bytes
    fetch_s = job.model.fetch_s + size_bytes / min(shares.node_bytes_s, shares.source_bytes_s)
    stored_s = size_bytes / min(shares.node_bytes_s, shares.store_bytes_s)
    return fetch_s + stored_s + _held(scenario, calibration, job)


def fewest_requests(scenario: Scenario, calibration: Calibration) -> dict[str, float]:
    """Returns the requests of all publishes by limit, if no two of one model are concurrent."""
    shares = scenario.capacities
    counts = dict.fromkeys(shares.requests_s, 0.0)
    kinds = len(scenario.kinds)
    publishes = scenario.models * kinds
    parts = scenario.models * (kinds * scenario.parts_before + kinds * (kinds - 1) / 2)
    for kind, cost in calibration.registries[shares.registry].items():
        for group in groups_of(kind):
            if group in counts:
                counts[group] += cost.base * publishes + cost.per_part * parts
    return counts
