"""Records of the measurements: sessions at once in each way, and workers with their threads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ortprep.doctor.parallel.gil import GilObservations
from ortprep.doctor.parallel.sessions import GroupFigures
from ortprep.measuring.comparison import MIN_ROUNDS
from ortprep.measuring.rounds import InterleavedRuns
from ortprep.tables import count_of

Way = Literal["sequential", "threads", "processes"]
WAYS: tuple[Way, ...] = ("sequential", "threads", "processes")
"""The simplest first: of two that take as long, the simpler one is the better one."""

PHRASES: Mapping[Way, str] = {
    "sequential": "one after another",
    "threads": "in threads of one process",
    "processes": "in a process each",
}


@dataclass(frozen=True)
class PlacedModel:
    """One of the sessions at once.

    Attributes:
        name: Name of the model, for people.
        device: `cpu`, `cuda:0`, …
        threads: Threads of its operators, the same in every way; None on a GPU.
    """

    name: str
    device: str
    threads: int | None


@dataclass(frozen=True)
class WorkerSetup:
    """Processes that serve one model.

    Attributes:
        workers: Number of processes.
        threads: Threads of each for its operators, None for ONNX Runtime's default.
    """

    workers: int
    threads: int | None

    def __str__(self) -> str:
        threads = "default threads" if self.threads is None else f"{count_of(self.threads, 'thread')} each"
        return f"{count_of(self.workers, 'worker')}, {threads}"


@dataclass(frozen=True)
class ParallelRun:
    """All measurements.

    Attributes:
        models: The sessions at once; none without a model.
        lanes: Most sessions that can be made at once: devices, or usable cores of the CPU.
        ways: Figures of each way.
        setups: The setups of workers that were compared.
        workers: Figures of each setup by its text; None where none was compared.
        gil: Observations of a ticking thread.
    """

    models: tuple[PlacedModel, ...]
    lanes: int
    ways: InterleavedRuns[Way, GroupFigures]
    setups: tuple[WorkerSetup, ...]
    workers: InterleavedRuns[str, GroupFigures] | None
    gil: GilObservations

    @property
    def has_shared_device(self) -> bool:
        """Whether several sessions are on one device."""
        return len(self.models) > len({model.device for model in self.models})

    def read(self, figure: Callable[[GroupFigures], float]) -> dict[Way, list[float]]:
        """Returns a figure of every way that was measured often enough, round by round."""
        if self.ways.completed < MIN_ROUNDS:
            return {}
        return {way: [figure(one) for one in rounds] for way, rounds in self.ways.rounds.items()}

    def runs_of(self, index: int) -> dict[Way, list[float]]:
        """Returns a model's median run in every round of each way."""
        return self.read(lambda figures: figures.run_ms[index])
