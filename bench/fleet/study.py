"""The reported runs: failures, policies, and growing fleets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from bench.fleet.breaking import S3_REGISTRY, find_breaks
from bench.fleet.calibration import Calibration
from bench.fleet.outcome import Outcome
from bench.fleet.scenario import FLEET, HARSH, HOSTILE, NONE, USUAL, Capacities, Failures, Kind, Scenario

FAILURES: Mapping[str, Failures] = {"none": NONE, "usual": USUAL, "harsh": HARSH, "hostile": HOSTILE}
GROWING = ((10, ("ECR",)), (20, ("ECR",)), (40, ("ECR",)), (80, ("ECR", "S3")))
"""Fleets that grow: machines of each kind, and the registries they publish to."""

JOBS_PER_MACHINE = 20
"""What a large fleet has to do at least: with less, the longest build alone decides."""

RETRIES = 3
"""Retries of a job before the engine gives it up and leaves it to the next run."""

Run = Callable[[Sequence[Scenario]], Sequence[Outcome]]


def balanced(nodes: int) -> tuple[Kind, ...]:
    """Returns the fleet's kinds with equal numbers of machines."""
    return tuple(replace(kind, nodes=nodes) for kind in FLEET)


def study(calibration: Calibration, run: Run, *, models: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Returns all runs' figures as JSON types.

    Args:
        calibration: What was measured.
        run: Simulates scenarios, in any order, and returns their outcomes in the order given.
        models: Models to prepare; more where a fleet is too large for so few.
        seeds: Seeds of the runs whose spread is reported; growing fleets take the first.
    """
    base = Scenario(models=models)
    named = {
        "failures": {name: replace(base, failures=failures) for name, failures in FAILURES.items()},
        "policies": _policies(base),
    }
    seeded = [
        replace(scenario, seed=seed)
        for scenarios in named.values()
        for scenario in scenarios.values()
        for seed in seeds
    ]
    grown = _growing(base, seeds[0])
    # The longest first, so that none is left over when the others are done.
    outcomes = list(run([*grown.values(), *seeded]))
    of_growing, of_seeded = outcomes[: len(grown)], iter(outcomes[len(grown) :])
    return {
        "question": "a thousand models for five kinds of hardware, simulated",
        "machine": calibration.machine,
        "models": models,
        "seeds": list(seeds),
        "fleet": [asdict(kind) for kind in FLEET],
        **{
            group: {name: summarise([next(of_seeded) for _ in seeds]) for name in scenarios}
            for group, scenarios in named.items()
        },
        "growing": {name: summarise([outcome]) for name, outcome in zip(grown, of_growing, strict=True)},
        "breaks": [asdict(one) for one in find_breaks(replace(base, kinds=balanced(1)), calibration)],
    }


def _growing(base: Scenario, seed: int) -> dict[str, Scenario]:
    registries = {"ECR": base.capacities, "S3": S3_REGISTRY}
    return {
        f"{5 * nodes} machines, {models} models, {name}": replace(
            base,
            kinds=balanced(nodes),
            models=models,
            capacities=registries[name],
            largest_first=True,
            seed=seed,
        )
        for nodes, names in reversed(GROWING)
        for name in names
        for models in [max(base.models, base.models * nodes * JOBS_PER_MACHINE // 1000)]
    }


def _policies(base: Scenario) -> dict[str, Scenario]:
    even = replace(base, kinds=balanced(10))
    single = tuple(replace(kind, devices=1, nodes=kind.nodes * kind.devices) for kind in FLEET)
    return {
        "10 machines of each kind": even,
        "the same, largest models first": replace(even, largest_first=True),
        "the fleet, measurements alone on a device only": replace(base, is_alone=False),
        "the fleet, each h100 in a machine of its own": replace(base, kinds=single),
    }


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns medians with the lowest and highest of several runs; what never differs as one number."""
    figures = [_figures(outcome) for outcome in outcomes]
    return {
        "bound_by": sorted({outcome.bound_by for outcome in outcomes}),
        **{name: _spread([one[name] for one in figures]) for name in figures[0]},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(median(values), 4),
        "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
    }


def _figures(outcome: Outcome) -> dict[str, float]:
    waste = outcome.waste
    used_s = sum(outcome.alone_s.values())
    return {
        "published_once": sum(times == 1 for times in outcome.published) / len(outcome.published),
        "makespan_h": outcome.makespan_s / 3600,
        "bound_h": outcome.bound_s / 3600,
        "ratio": outcome.ratio,
        **{f"{way}_tb": size / 1e12 for way, size in sorted(outcome.bytes.items())},
        "requests": sum(outcome.requests.values()),
        "mean_requests_s": outcome.mean_requests_s,
        "peak_requests_s": outcome.peak_requests_s,
        "registry_wait_s_per_publish": sum(
            seconds for name, seconds in outcome.waited_s.items() if name != "driver"
        )
        / len(outcome.published),
        "impatient_share": outcome.impatient / len(outcome.published),
        "store_requests": outcome.store_requests,
        "tasks": outcome.tasks,
        "wasted_share": waste.exclusive_s / used_s,
        "wasted_tb": waste.bytes / 1e12,
        "moves": sum(outcome.moves),
        "given_up_share": sum(retries > RETRIES for retries in outcome.retries) / len(outcome.retries),
        "collect_h": outcome.bytes["published"] / Capacities().node_bytes_s / 3600,
        "node_deaths": waste.node_deaths,
        "driver_deaths": waste.driver_deaths,
        "transfer_errors": waste.transfer_errors,
        **{f"finished_h {kind}": seconds / 3600 for kind, seconds in outcome.finished_s.items()},
    }
