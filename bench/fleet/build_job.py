"""The work: models of random size, and for each kind of hardware a job of stages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from bench.fleet.calibration import Calibration, StageCost
from bench.fleet.scenario import Kind, Scenario

if TYPE_CHECKING:
    from simpy import Event, Process

MB = 1e6


@dataclass(frozen=True)
class Work:
    """One stage of one job, its length drawn already.

    Attributes:
        task: As in the calibration.
        is_exclusive: Whether it has its device alone.
        seconds: How long it runs.
        new_bytes: Of files that it leaves and the store has not; of the bundle, where it publishes.
        files: How many.
    """

    task: str
    is_exclusive: bool
    seconds: float
    new_bytes: float
    files: int


@dataclass(eq=False)
class Model:
    """One model on its way.

    Attributes:
        index: Its number.
        source_bytes: Its size.
        fetch_s: What fetching it takes, transfers apart.
        fetched: Happens when the store has it.
        parts: Parts of it that the registry has.
        publishing: Machines that publish it just now.
    """

    index: int
    source_bytes: float
    fetch_s: float
    fetched: Event | None = None
    parts: int = 0
    publishing: int = 0


@dataclass(eq=False)
class BuildJob:
    """A model for a kind of hardware: the stages that one machine runs, one after the other.

    Attributes:
        model: The model.
        kind: Index of the kind.
        stages: In order; the last one publishes.
        done: How many stages have their receipts in the store.
        published: How often it came to its end; once, or something is wrong.
        random: Its own chance, so that it does not depend on what others do.
        home: The machine it was on last, and how often that had died by then; None for none.
        moves: How often it had to start again, from its last receipt.
        retries: How often since the driver that runs now has handed it out.
        most_retries: The most of them with any driver.
        process: Works on it.
    """

    model: Model
    kind: int
    stages: tuple[Work, ...]
    random: Random
    done: int = 0
    published: int = 0
    home: tuple[str, int] | None = None
    moves: int = 0
    retries: int = 0
    most_retries: int = 0
    process: Process | None = field(default=None, repr=False)

    @property
    def left_bytes(self) -> float:
        """Bytes that another machine needs to go on: the source and what the stages so far left."""
        return self.model.source_bytes + sum(stage.new_bytes for stage in self.stages[: self.done])

    @property
    def publish_bytes(self) -> float:
        """Bytes of the bundle."""
        return self.stages[-1].new_bytes

    @property
    def kept_bytes(self) -> float:
        """Bytes of files that go into the store."""
        return sum(stage.new_bytes for stage in self.stages[:-1])


def draw_jobs(scenario: Scenario, calibration: Calibration) -> tuple[BuildJob, ...]:
    """Returns a job for every model and kind; the same for the same seed, whatever else differs.

    Sizes are log-normal as the calibration says, cut off at the largest model that was built here.
    """
    jobs = []
    for index in range(scenario.models):
        random = Random(f"{scenario.seed}/{index}")
        mb = min(
            random.lognormvariate(math.log(calibration.median_mb), calibration.sigma), calibration.largest_mb
        )
        fetch_s = _draw_seconds(calibration.fetch, mb, random, slowness=1.0)
        model = Model(index, mb * MB, fetch_s, parts=scenario.parts_before)
        for number, kind in enumerate(scenario.kinds):
            own = Random(f"{scenario.seed}/{index}/{kind.name}")
            stages = tuple(_draw_stage(cost, mb, own, kind) for cost in calibration.stages)
            jobs.append(BuildJob(model, number, stages, own))
    return tuple(jobs)


def _draw_stage(cost: StageCost, mb: float, random: Random, kind: Kind) -> Work:
    seconds = _draw_seconds(cost, mb, random, slowness=kind.slowness)
    return Work(cost.task, cost.is_exclusive, seconds, cost.new_per_mb * mb * MB, cost.files)


def _draw_seconds(cost: StageCost, mb: float, random: Random, *, slowness: float) -> float:
    line_s = cost.base_s + cost.per_mb_s * mb
    return slowness * line_s * random.lognormvariate(0.0, cost.spread)
