"""Failures: machines die and are replaced, the driver dies and is started again."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from random import Random
from typing import Any

from simpy import Environment, Event

from bench.fleet.build_job import BuildJob
from bench.fleet.node import Node
from bench.fleet.outcome import Waste
from bench.fleet.scenario import Scenario

Steps = Generator[Event, Any, None]


class Trouble:
    """Interrupts the jobs that a death affects; they go on elsewhere, or later.

    Args:
        env: The simulated time.
        scenario: How often it happens.
        nodes: The machines, by kind.
        waste: Where it is counted.
    """

    def __init__(
        self, env: Environment, scenario: Scenario, nodes: Sequence[Sequence[Node]], waste: Waste
    ) -> None:
        self._env, self._failures, self._seed = env, scenario.failures, scenario.seed
        self._nodes = [node for of_kind in nodes for node in of_kind]
        self._waste = waste
        self._driver_back: Event | None = None

    def begin(self, on_return: Callable[[int], None]) -> None:
        """Starts the clock of every death.

        Args:
            on_return: Called with the kind of each replaced machine.
        """
        if self._failures.node_mtbf_h < math.inf:
            for node in self._nodes:
                self._env.process(self._lose_node(node, on_return))
        if self._failures.driver_mtbf_h < math.inf:
            self._env.process(self._lose_driver())

    @property
    def is_driver_gone(self) -> bool:
        """Whether the driver is dead."""
        return self._driver_back is not None

    def wait_for_driver(self) -> Steps:
        """Waits while the driver is dead."""
        while self._driver_back is not None:
            yield self._driver_back

    def lifetime(self, node: Node) -> tuple[int, int]:
        """Returns what is different once a fetch is lost, with its machine or with the driver."""
        return node.deaths, self._waste.driver_deaths

    def _lose_node(self, node: Node, on_return: Callable[[int], None]) -> Steps:
        random = Random(f"{self._seed}/{node.name}")
        while True:
            yield self._env.timeout(random.expovariate(1 / (self._failures.node_mtbf_h * 3600)))
            self._waste.node_deaths += 1
            node.deaths += 1
            node.is_alive = False
            self._interrupt(node.jobs)
            yield self._env.timeout(self._failures.replacement_s)
            node.is_alive = True
            on_return(node.kind)

    def _lose_driver(self) -> Steps:
        random = Random(f"{self._seed}/driver")
        while True:
            yield self._env.timeout(random.expovariate(1 / (self._failures.driver_mtbf_h * 3600)))
            self._waste.driver_deaths += 1
            self._driver_back = self._env.event()
            self._interrupt(job for node in self._nodes for job in node.jobs)
            yield self._env.timeout(self._failures.restart_s)
            back, self._driver_back = self._driver_back, None
            back.succeed()

    def _interrupt(self, jobs: Iterable[BuildJob]) -> None:
        for job in sorted(jobs, key=lambda one: (one.model.index, one.kind)):
            if job.process is not None and job.process.is_alive:
                job.process.interrupt()
