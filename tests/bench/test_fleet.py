"""Laws of the simulated fleet; its figures are `python -m bench.fleet`'s."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("simpy", reason="comes with the extra bench")

from bench.fleet.bound import lower_bounds
from bench.fleet.breaking import find_breaks
from bench.fleet.build_job import draw_jobs
from bench.fleet.calibration import Calibration, RequestCost, StageCost
from bench.fleet.outcome import peak_rate
from bench.fleet.pipe import Pipe
from bench.fleet.scenario import NONE, Failures, Kind, Scenario
from bench.fleet.simulation import Simulation, simulate

TROUBLE = Failures(
    node_mtbf_h=0.2, replacement_s=60, driver_mtbf_h=0.3, restart_s=30, transfer_error=0.2, retry_s=1
)
KINDS = (Kind("cpu", 3), Kind("gpu", 2, devices=4))
SMALL = Scenario(kinds=KINDS, models=12)
SEEDS = range(5)


def stage(task: str, seconds: float, *, alone: bool = False, new: float = 0.0) -> StageCost:
    return StageCost(task, alone, seconds, 0.01, 0.3, new, 2)


CALIBRATION = Calibration(
    machine={},
    median_mb=80.0,
    sigma=1.5,
    smallest_mb=5.0,
    largest_mb=5000.0,
    fetch=stage("fetch", 3.0, new=1.0),
    stages=(
        stage("optimize/target", 5.0, new=1.0),
        stage("verify/target", 5.0),
        stage("tune/target", 60.0, alone=True),
        stage("measure/target", 80.0, alone=True),
        stage("package", 2.0),
        StageCost("publish", False, 0.0, 0.0, 0.0, 2.0, 8),
    ),
    registries={
        "oci": {"PUT manifest": RequestCost(7, 0, 1), "GET manifest": RequestCost(14, 4, 20)},
        "s3": {"PUT": RequestCost(9, 0, 1), "GET": RequestCost(24, 4, 20)},
    },
    publish_floor_s=1.0,
    observed={},
)


@pytest.mark.parametrize("failures", [NONE, TROUBLE], ids=["calm", "trouble"])
@pytest.mark.parametrize("is_alone", [True, False], ids=["machine", "device"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_run_is_sooner_than_the_bound(failures: Failures, is_alone: bool, seed: int) -> None:
    outcome = simulate(replace(SMALL, failures=failures, is_alone=is_alone, seed=seed), CALIBRATION)
    assert outcome.ratio >= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_every_job_is_published_once_however_much_fails(seed: int) -> None:
    outcome = simulate(replace(SMALL, failures=TROUBLE, seed=seed), CALIBRATION)
    assert outcome.waste.node_deaths + outcome.waste.driver_deaths > 0
    assert outcome.published == (1,) * SMALL.models * len(KINDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_ran_is_what_was_needed_and_what_was_wasted(seed: int) -> None:
    simulation = Simulation(replace(SMALL, failures=TROUBLE, seed=seed), CALIBRATION)
    waste = simulation.run().waste
    ran_s = sum(ran.end_s - ran.begin_s for ran in simulation.trace)
    needed_s = sum(one.seconds for job in simulation.jobs for one in job.stages)
    assert waste.exclusive_s > 0
    assert ran_s == pytest.approx(needed_s + waste.exclusive_s + waste.shared_s)


def test_nothing_is_wasted_where_nothing_fails() -> None:
    waste = simulate(SMALL, CALIBRATION).waste
    assert waste == type(waste)()


def test_nothing_moves_twice_where_nothing_fails() -> None:
    jobs = draw_jobs(SMALL, CALIBRATION)
    sources = sum({job.model: job.model.source_bytes for job in jobs}.values())
    moved = simulate(SMALL, CALIBRATION).bytes
    assert moved["fetched"] == pytest.approx(sources)
    assert moved["loaded"] == pytest.approx(sources * len(KINDS))
    assert moved["stored"] == pytest.approx(sources + sum(job.kept_bytes for job in jobs))
    assert moved["published"] == pytest.approx(sum(job.publish_bytes for job in jobs))


@pytest.mark.parametrize("failures", [NONE, TROUBLE], ids=["calm", "trouble"])
def test_a_measurement_has_its_machine_alone(failures: Failures) -> None:
    simulation = Simulation(replace(SMALL, failures=failures), CALIBRATION)
    simulation.run()
    nodes = defaultdict(list)
    for ran in simulation.trace:
        nodes[ran.node.name].append(ran)
    assert len(nodes) == sum(kind.nodes for kind in KINDS)
    for on_node in nodes.values():
        alone = sorted((ran.begin_s, ran.end_s) for ran in on_node if ran.is_exclusive)
        assert all(first[1] <= second[0] for first, second in pairwise(alone))
        beside = [ran for ran in on_node if not ran.is_exclusive and ran.end_s > ran.begin_s]
        assert not any(ran.begin_s < end and begin < ran.end_s for ran in beside for begin, end in alone)


def test_never_more_jobs_run_on_a_machine_than_it_has_devices() -> None:
    simulation = Simulation(replace(SMALL, is_alone=False), CALIBRATION)
    simulation.run()
    most: dict[str, int] = defaultdict(int)
    for ran in simulation.trace:
        beside = {
            other.job
            for other in simulation.trace
            if other.node is ran.node and other.begin_s <= ran.begin_s < other.end_s
        }
        most[ran.node.name] = max(most[ran.node.name], len(beside))
    assert max(most[f"cpu-{index}"] for index in range(3)) == 1
    assert 1 < max(most[f"gpu-{index}"] for index in range(2)) <= 4


@pytest.mark.parametrize("failures", [NONE, TROUBLE], ids=["calm", "trouble"])
def test_the_same_seed_gives_the_same_run(failures: Failures) -> None:
    scenario = replace(SMALL, failures=failures)
    assert simulate(scenario, CALIBRATION) == simulate(scenario, CALIBRATION)
    assert simulate(scenario, CALIBRATION) != simulate(replace(scenario, seed=2), CALIBRATION)


@pytest.mark.parametrize("kind", [0, 1])
def test_more_machines_never_raise_the_bound(kind: int) -> None:
    bounds = []
    for nodes in (1, 2, 3, 5, 50):
        kinds = tuple(replace(k, nodes=nodes) if i == kind else k for i, k in enumerate(KINDS))
        scenario = replace(SMALL, kinds=kinds)
        bounds.append(max(lower_bounds(scenario, CALIBRATION, draw_jobs(scenario, CALIBRATION)).values()))
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


def test_what_has_to_be_done_does_not_depend_on_the_machines() -> None:
    fewer = draw_jobs(SMALL, CALIBRATION)
    more = draw_jobs(replace(SMALL, kinds=tuple(replace(kind, nodes=9) for kind in KINDS)), CALIBRATION)
    assert [job.stages for job in fewer] == [job.stages for job in more]


def test_a_registry_that_takes_few_requests_decides_how_long_it_takes() -> None:
    slow = replace(SMALL, capacities=replace(SMALL.capacities, requests_s={"PUT manifest": 0.01}))
    outcome = simulate(slow, CALIBRATION)
    publishes = SMALL.models * len(KINDS)
    assert outcome.bound_by == "requests: PUT manifest"
    assert outcome.bound_s == pytest.approx(publishes * 7 / 0.01)
    assert outcome.impatient > publishes / 2
    assert simulate(SMALL, CALIBRATION).makespan_s < outcome.makespan_s


def test_what_breaks_first_is_what_the_simulation_meets_first() -> None:
    kinds = tuple(replace(kind, nodes=1) for kind in KINDS)
    first, *others = (
        one for one in find_breaks(replace(SMALL, kinds=kinds), CALIBRATION) if one.resource.startswith("ECR")
    )
    assert all(first.nodes <= one.nodes for one in others)
    for factor, is_met in ((0.5, False), (2.0, True)):
        many = round(first.nodes * factor / len(KINDS))
        crowd = replace(SMALL, models=400, kinds=tuple(replace(kind, nodes=many) for kind in KINDS))
        bounds = lower_bounds(crowd, CALIBRATION, draw_jobs(crowd, CALIBRATION))
        machines = max(value for name, value in bounds.items() if name.endswith((" cpu", " gpu")))
        assert (
            max(value for name, value in bounds.items() if name.startswith("requests")) > machines
        ) == is_met


def test_a_pipe_carries_no_more_than_its_rate() -> None:
    pipe = Pipe(rate=10.0)
    ends = [pipe.take(now_s, 5.0) for now_s in (0.0, 0.0, 4.0)]
    assert ends == [0.5, 1.0, 4.5]
    assert pipe.waited_s == 0.5


def test_a_peak_is_the_fullest_window() -> None:
    assert peak_rate([(0.0, 10.0), (5.0, 10.0), (20.0, 15.0)], window_s=10.0) == 2.0
