"""What sessions at once took in each way, and workers with their threads: records and tables. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ortprep.doctor.diagnosis import Rules
from ortprep.doctor.parallel.gil import (
    Call,
    GilObservations,
    Verdict,
    clearest,
    judge_creation,
    judge_run,
)
from ortprep.doctor.parallel.session_process import GroupFigures
from ortprep.measuring.comparison import MIN_ROUNDS, paired_ratio
from ortprep.measuring.rounds import InterleavedRuns
from ortprep.tables import Table, count_of, fill_table

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
        name: Display name.
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
        workers: How many.
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
        gil: What a ticking thread saw.
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


rule: Rules[ParallelRun] = Rules()
"""Makes a function a rule about the measurements."""


def build_tables(run: ParallelRun) -> tuple[Table, ...]:
    """Returns the ways, their runs, the workers, and the interpreter's lock, as medians of all rounds."""

    def mid(way: Way, figure: Callable[[GroupFigures], float]) -> float:
        return median(map(figure, run.ways.rounds[way]))

    def speed_up(way: Way) -> float | None:
        ready = run.read(lambda figures: figures.ready_ms)
        return paired_ratio(ready["sequential"], ready[way]) if {way, "sequential"} <= ready.keys() else None

    ways = [way for way in WAYS if way in run.ways.rounds]
    count, devices = len(run.models), ", ".join(dict.fromkeys(model.device for model in run.models))
    creation = fill_table(
        f"{count} sessions on {devices}: medians, start of the processes included",
        ways,
        (
            ("sessions made", lambda way: PHRASES[way]),
            ("all ready ms", lambda way: mid(way, lambda figures: figures.ready_ms)),
            ("start, import ms", lambda way: mid(way, lambda figures: figures.start_ms)),
            ("creating ms", lambda way: mid(way, lambda figures: figures.creating_ms)),
            ("private MB", lambda way: mid(way, lambda figures: figures.private_mb)),
            ("speed-up", speed_up),
            ("efficiency", lambda way: (gain := speed_up(way)) and gain / max(1, min(count, run.lanes))),
        ),
    )
    runs = fill_table(
        "median run of each, ms",
        enumerate(run.models) if ways else (),
        (
            ("model", lambda one: one[1].name),
            ("device", lambda one: one[1].device),
            ("threads", lambda one: one[1].threads),
            *((PHRASES[way], _reader(run, way)) for way in ways),
        ),
    )
    return (creation, runs, _workers_table(run), _gil_table(run.gil))


def _reader(run: ParallelRun, way: Way) -> Callable[[tuple[int, PlacedModel]], float]:
    return lambda one: median(figures.run_ms[one[0]] for figures in run.ways.rounds[way])


def _workers_table(run: ParallelRun) -> Table:
    rounds = {} if run.workers is None else run.workers.rounds
    return fill_table(
        "processes that serve the first model at once",
        [setup for setup in run.setups if str(setup) in rounds],
        (
            ("workers", lambda setup: setup.workers),
            ("threads each", lambda setup: setup.threads or "default"),
            ("runs per s", lambda setup: median(one.runs_per_s for one in rounds[str(setup)])),
            ("run ms", lambda setup: median(median(one.run_ms) for one in rounds[str(setup)])),
            ("private MB", lambda setup: median(one.private_mb for one in rounds[str(setup)])),
        ),
    )


def _gil_table(gil: GilObservations) -> Table:
    phases: tuple[tuple[str, tuple[Call, ...], Verdict | None], ...] = (
        ("make a session", gil.create, judge_creation(gil)),
        ("run it", gil.run, judge_run(gil)),
        ("known to release it", gil.released, None),
    )
    return fill_table(
        f"Do other Python threads run meanwhile? (ONNX Runtime {gil.onnxruntime})",
        phases,
        (
            ("phase", lambda phase: phase[0]),
            ("takes ms", lambda phase: clearest(phase[1]).elapsed_ms),
            ("longest gap ms", lambda phase: clearest(phase[1]).longest_gap_ms),
            ("ticks", lambda phase: clearest(phase[1]).ticks),
            ("lock", lambda phase: phase[2]),
        ),
    )
