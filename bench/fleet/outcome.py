"""The result of a simulated run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.fleet.build_job import BuildJob
    from bench.fleet.node import Node

WINDOW_S = 10.0
"""Seconds over which a peak is taken: what a quota forgives is shorter."""


@dataclass
class Ran:
    """A stage that held a machine, or part of it.

    Attributes:
        job: BuildJob of the stage.
        node: Machine that ran it.
        task: Name of the stage.
        begin_s: Start, in seconds.
        is_exclusive: Whether it had a device to itself.
        end_s: End, in seconds.
    """

    job: BuildJob
    node: Node
    task: str
    begin_s: float
    is_exclusive: bool
    end_s: float = 0.0


@dataclass
class Waste:
    """Wasted work.

    Attributes:
        exclusive_s: Seconds of devices that a stage had alone.
        shared_s: Seconds of cores.
        bytes: Bytes that were moved again, or for nothing.
        node_deaths: Machines that died.
        driver_deaths: How often the driver died.
        transfer_errors: Transfers that were repeated.
    """

    exclusive_s: float = 0.0
    shared_s: float = 0.0
    bytes: float = 0.0
    node_deaths: int = 0
    driver_deaths: int = 0
    transfer_errors: int = 0

    def add(self, ran: Ran | None) -> None:
        """Adds a stage that left no receipt."""
        if ran is not None and ran.is_exclusive:
            self.exclusive_s += ran.end_s - ran.begin_s
        elif ran is not None:
            self.shared_s += ran.end_s - ran.begin_s


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        makespan_s: Until the last job was published.
        bounds_s: See `bound.lower_bounds`.
        finished_s: When each kind's last job was published.
        published: How often each job was.
        bytes: Moved, by way.
        requests: Sent to the registry, by kind.
        mean_requests_s: Requests per second, over the makespan.
        peak_requests_s: The most that publishes asked for in ten seconds, per second.
        waited_s: Seconds that publishes stood at each limit of the registry, and tasks at the driver, summed.
        impatient: Publishes that would have failed: see `shared.Registry`.
        store_requests: Requests to the store.
        tasks: Submitted by the driver.
        alone_s: Seconds in which a stage had a device alone, by kind.
        moves: How often each job had to start again, from its last receipt.
        retries: The most of them that one driver had to ask for.
        waste: Wasted work.
    """

    makespan_s: float
    bounds_s: Mapping[str, float]
    finished_s: Mapping[str, float]
    published: tuple[int, ...]
    bytes: Mapping[str, float]
    requests: Mapping[str, float]
    mean_requests_s: float
    peak_requests_s: float
    waited_s: Mapping[str, float]
    impatient: int
    store_requests: int
    tasks: int
    alone_s: Mapping[str, float]
    moves: tuple[int, ...]
    retries: tuple[int, ...]
    waste: Waste = field(default_factory=Waste)

    @property
    def bound_s(self) -> float:
        """The lower bound."""
        return max(self.bounds_s.values())

    @property
    def bound_by(self) -> str:
        """What forces it."""
        return max(self.bounds_s, key=lambda name: self.bounds_s[name])

    @property
    def ratio(self) -> float:
        """Makespan over the lower bound."""
        return self.makespan_s / self.bound_s


def peak_rate(offered: Iterable[tuple[float, float]], window_s: float = WINDOW_S) -> float:
    """Returns the largest sum within any window, per second.

    Args:
        offered: Times, in order, and how much came at each.
        window_s: Length of the window.
    """
    inside: deque[tuple[float, float]] = deque()
    total = most = 0.0
    for at_s, count in offered:
        inside.append((at_s, count))
        total += count
        while inside[0][0] <= at_s - window_s:
            total -= inside.popleft()[1]
        most = max(most, total)
    return most / window_s
