"""Simulates `ortprep prepare --engine ray` on a fleet as events in simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Generator
from random import Random
from typing import Any

from simpy import Environment, Event, Interrupt

from bench.fleet.bound import lower_bounds
from bench.fleet.build_job import BuildJob, Model, Work, draw_jobs
from bench.fleet.calibration import Calibration
from bench.fleet.node import Node, emptiest
from bench.fleet.outcome import Outcome, Ran, Waste, peak_rate
from bench.fleet.scenario import Scenario
from bench.fleet.shared import open_shared
from bench.fleet.trouble import Trouble

Steps = Generator[Event, Any, None]


class Simulation:
    """One run; `run` plays it to its end.

    Args:
        scenario: Assumptions.
        calibration: Measured inputs.
    """

    def __init__(self, scenario: Scenario, calibration: Calibration) -> None:
        self.scenario = scenario
        self.calibration = calibration
        self.jobs = draw_jobs(scenario, calibration)
        self.trace: list[Ran] = []
        self._env = Environment()
        self._waste = Waste()
        self._shared = open_shared(scenario, calibration, self._waste)
        self._random = Random(f"{scenario.seed}/failures")
        self._nodes = tuple(
            tuple(
                Node(
                    f"{kind.name}-{index}",
                    number,
                    kind.devices,
                    scenario.is_alone,
                )
                for index in range(kind.nodes)
            )
            for number, kind in enumerate(scenario.kinds)
        )
        self._trouble = Trouble(self._env, scenario, self._nodes, self._waste)
        self._ready: list[list[tuple[float, int, BuildJob, Event]]] = [[] for _ in scenario.kinds]
        self._unfetched: list[Model] = []
        self._left = len(self.jobs)
        self._over = self._env.event()
        self._finished_s = {kind.name: 0.0 for kind in scenario.kinds}
        self._alone_s = {kind.name: 0.0 for kind in scenario.kinds}

    def run(self) -> Outcome:
        """Returns the outcome."""
        models = list(dict.fromkeys(job.model for job in self.jobs))
        for model in models:
            model.fetched = self._env.event()
        self._unfetched = sorted(models, key=self._urgency, reverse=True)
        for nodes in self._nodes:
            for node in nodes:
                self._env.process(self._fetch_models(node))
        self._trouble.begin(self._fill)
        for job in self.jobs:
            job.process = self._env.process(self._prepare(job))
        self._env.run(until=self._over)
        return self._sum_up()

    def _urgency(self, model: Model) -> float:
        return -model.source_bytes if self.scenario.largest_first else float(model.index)

    # -- models ---------------------------------------------------------------------------------------------

    def _fetch_models(self, node: Node) -> Steps:
        """One fetch at a time on each machine, until every model is in the store."""
        while self._unfetched:
            yield from self._trouble.wait_for_driver()
            if not node.is_alive:
                yield self._env.timeout(self.scenario.failures.replacement_s)
                continue
            if not self._unfetched:
                return
            model, lifetime = self._unfetched.pop(), self._trouble.lifetime(node)
            yield self._env.timeout(self._shared.driver.take(self._env.now, 1) - self._env.now)
            grant = node.request(self._env, is_exclusive=False)
            yield grant.event
            yield self._env.timeout(self._shared.fetch(self._env.now, model.source_bytes) + model.fetch_s)
            node.release(grant)
            yield self._env.timeout(
                self._shared.store.move("stored", self._env.now, model.source_bytes, 1, self._random)
            )
            if self._trouble.lifetime(node) != lifetime:
                self._waste.bytes += 2 * model.source_bytes
                self._unfetched.append(model)
                continue
            assert model.fetched is not None
            model.fetched.succeed()

    # -- jobs ----------------------------------------------------------------------------------------------

    def _prepare(self, job: BuildJob) -> Steps:
        """Takes a job through its stages, on as many machines as it needs."""
        assert job.model.fetched is not None
        while True:
            try:
                if not job.model.fetched.processed:
                    yield job.model.fetched
                yield from self._trouble.wait_for_driver()
                yield self._env.timeout(self._shared.driver.take(self._env.now, 1) - self._env.now)
                yield from self._live(job)
            except Interrupt:
                job.moves += 1
                job.retries = 0 if self._trouble.is_driver_gone else job.retries + 1
                job.most_retries = max(job.most_retries, job.retries)
            else:
                break
        self._left -= 1
        self._finished_s[self.scenario.kinds[job.kind].name] = self._env.now
        if not self._left:
            self._over.succeed()

    def _live(self, job: BuildJob) -> Steps:
        """Takes a slot on a machine and keeps it until the job is published, or one of them dies."""
        place = self._env.event()
        entry = (self._urgency(job.model), job.model.index, job, place)
        heapq.heappush(self._ready[job.kind], entry)
        self._fill(job.kind)
        try:
            node = yield place
            yield from self._settle(job, node)
            *kept, package, _ = job.stages
            for stage in kept[job.done :]:
                yield from self._run_stage(job, node, stage)
                job.done += 1
            # Both or neither: the receipt of the packaging says what was published.
            packaged = yield from self._run_stage(job, node, package)
            yield from self._publish(job, packaged)
        finally:
            if place.triggered and place.value is not None:
                place.value.jobs.discard(job)
            else:
                self._ready[job.kind].remove(entry)
                heapq.heapify(self._ready[job.kind])
            self._fill(job.kind)

    def _settle(self, job: BuildJob, node: Node) -> Steps:
        """Gets the job's files, unless it was interrupted on this machine."""
        home = (node.name, node.deaths)
        if job.home != home:
            self._waste.bytes += job.left_bytes if job.home else 0
            job.home = home
            loading_s = self._shared.store.move(
                "loaded", self._env.now, job.left_bytes, 1 + job.done, job.random
            )
            yield self._env.timeout(loading_s)

    def _fill(self, kind: int) -> None:
        """Assigns waiting jobs to machines of their kind, the emptiest first."""
        while self._ready[kind]:
            node = emptiest(self._nodes[kind])
            if node is None:
                return
            *_, job, place = heapq.heappop(self._ready[kind])
            node.jobs.add(job)
            place.succeed(node)

    def _run_stage(self, job: BuildJob, node: Node, stage: Work) -> Generator[Event, Any, Ran | None]:
        grant = node.request(self._env, is_exclusive=stage.is_exclusive)
        ran = None
        try:
            try:
                yield grant.event
                ran = Ran(job, node, stage.task, self._env.now, stage.is_exclusive)
                yield self._env.timeout(stage.seconds)
            finally:
                node.release(grant)
                self._note(ran)
            moving_s = self._shared.store.move(
                "stored", self._env.now, stage.new_bytes, stage.files, job.random
            )
            yield self._env.timeout(moving_s)
        except Interrupt:
            self._waste.add(ran)
            raise
        return ran

    def _note(self, ran: Ran | None) -> None:
        if ran is not None:
            ran.end_s = self._env.now
            self.trace.append(ran)
            if ran.is_exclusive:
                self._alone_s[self.scenario.kinds[ran.job.kind].name] += ran.end_s - ran.begin_s

    def _publish(self, job: BuildJob, packaged: Ran | None) -> Steps:
        model, now_s = job.model, self._env.now
        end_s = self._shared.registry.publish(now_s, model, job.publish_bytes)
        end_s = max(end_s, now_s + job.publish_bytes / self.scenario.capacities.node_bytes_s)
        model.publishing += 1
        try:
            yield self._env.timeout(end_s - now_s)
        except Interrupt:
            self._waste.add(packaged)
            self._waste.bytes += job.publish_bytes
            raise
        finally:
            model.publishing -= 1
        model.parts += 1
        job.done = len(job.stages)
        job.published += 1

    # -- the end --------------------------------------------------------------------------------------------

    def _sum_up(self) -> Outcome:
        shared, makespan_s = self._shared, self._env.now
        requests = sum(shared.registry.sent.values())
        return Outcome(
            makespan_s=makespan_s,
            bounds_s=lower_bounds(self.scenario, self.calibration, self.jobs),
            finished_s=self._finished_s,
            published=tuple(job.published for job in self.jobs),
            bytes={
                **shared.store.bytes,
                "fetched": shared.source.total,
                "published": shared.registry.bytes.total,
            },
            requests=dict(shared.registry.sent),
            mean_requests_s=requests / makespan_s,
            peak_requests_s=peak_rate(shared.registry.offered),
            waited_s={
                "driver": shared.driver.waited_s,
                **{name: pipe.waited_s for name, pipe in shared.registry.limits.items()},
            },
            impatient=shared.registry.impatient,
            store_requests=shared.store.requests,
            tasks=round(shared.driver.total),
            alone_s=self._alone_s,
            moves=tuple(job.moves for job in self.jobs),
            retries=tuple(job.most_retries for job in self.jobs),
            waste=self._waste,
        )


def simulate(scenario: Scenario, calibration: Calibration) -> Outcome:
    """Returns the outcome of a scenario; the same for the same seed."""
    return Simulation(scenario, calibration).run()
