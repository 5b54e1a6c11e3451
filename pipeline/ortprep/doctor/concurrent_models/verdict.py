"""Conclusions about models that run alone, in threads and in processes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.interleaved_runs import PHRASES, explain_failures, phrase_medians, read_rounds
from ortprep.measuring.comparison import MIN_ROUNDS, is_below, paired_ratio
from ortprep.measuring.rounds import InterleavedRuns
from ortprep.tables import CellValue, Table

Situation = Literal["alone", "threads", "processes"]
SITUATIONS: tuple[Situation, ...] = ("alone", "threads", "processes")

_MIN_SLOW_DOWN = 0.1
"""Smallest relative slow-down that is called contention, noise or not."""


@dataclass(frozen=True)
class ModelRuns:
    """Runs of one model in one window.

    Attributes:
        run_ms: Duration of each run, in order; at least one.
    """

    run_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Median duration of a run."""
        return median(self.run_ms)


@dataclass(frozen=True)
class PlacedModel:
    """One of the models that run at once.

    Attributes:
        name: Display name.
        device: `cpu`, `cuda:0`, …
        threads: Threads of its operators, the same in every situation; None on a GPU.
    """

    name: str
    device: str
    threads: int | None


@dataclass(frozen=True)
class Contention:
    """Measurements of all situations.

    Attributes:
        models: Models that run at once.
        onnxruntime: Version.
        situations: Runs of every model in each situation.
    """

    models: tuple[PlacedModel, ...]
    onnxruntime: str
    situations: InterleavedRuns[Situation, tuple[ModelRuns, ...]]

    def medians(self, index: int) -> dict[Situation, list[float]]:
        """Returns a model's median run in every round of each situation, in milliseconds."""
        return read_rounds(self.situations, lambda models: models[index].median_ms)


def slow_down(contention: Contention, index: int, situation: Situation) -> float | None:
    """Returns how many times longer a model's runs take than alone; None where either was not measured."""
    medians = contention.medians(index)
    return (
        paired_ratio(medians[situation], medians["alone"]) if {situation, "alone"} <= medians.keys() else None
    )


def find_in(contention: Contention) -> tuple[Finding, ...]:
    """Returns the findings."""
    names = ", ".join(model.name for model in contention.models)
    failures = explain_failures(contention.situations, names)
    if contention.situations.completed < MIN_ROUNDS:
        return tuple(failures)
    return (*failures, *_compare_ways(contention), *_compare_alone(contention))


def tabulate(contention: Contention) -> Table:
    """Returns every model in every situation; medians of all rounds' runs."""
    rows = tuple(
        _row(contention, index, situation)
        for index in range(len(contention.models))
        for situation in SITUATIONS
        if situation in contention.situations.rounds
    )
    columns = ("model", "device", "threads", "runs", "median ms", "runs per s", "times alone")
    return Table(f"{len(contention.models)} models at once", columns, rows)


def _row(contention: Contention, index: int, situation: Situation) -> tuple[CellValue, ...]:
    model = contention.models[index]
    runs = [run_ms for models in contention.situations.rounds[situation] for run_ms in models[index].run_ms]
    return (
        model.name,
        model.device,
        model.threads,
        PHRASES[situation],
        round(median(runs), 2),
        round(len(runs) / sum(runs) * 1e3, 1),
        None if situation == "alone" else slow_down(contention, index, situation),
    )


def _compare_ways(contention: Contention) -> Iterator[Finding]:
    if not {"threads", "processes"} <= contention.situations.rounds.keys():
        return
    if slower := _beaten(contention, by="processes", in_="threads"):
        text = "models run slower in threads of one process than in a process each: "
        hint = 'a process per device: SessionPool({"a": "artifacts/A", "b": "artifacts/B"})'
        yield Finding("threads-contend", "advice", text + _ratios(contention, slower), hint)
    elif slower := _beaten(contention, by="threads", in_="processes"):
        text = "models run slower in a process each than in threads of one process: "
        hint = "run them in threads of one process"
        yield Finding("processes-contend", "note", text + _ratios(contention, slower), hint)
    else:
        text = "no model runs slower in threads of one process than in a process each, beyond the noise: "
        text += _ratios(contention, range(len(contention.models)))
        yield Finding("threads-as-fast", "ok", text)


def _compare_alone(contention: Contention) -> Iterator[Finding]:
    """Yields whether models slow each other down even the better way, which no choice between them mends."""
    ways = [way for way in SITUATIONS[1:] if {way, "alone"} <= contention.situations.rounds.keys()]
    if not ways:
        return
    models = range(len(contention.models))
    way = min(ways, key=lambda way: max(slow_down(contention, index, way) or 1.0 for index in models))
    slower = _beaten(contention, by="alone", in_=way)
    if not slower:
        text = f"no model runs slower at once {PHRASES[way]} than alone, beyond the noise"
        yield Finding("as-fast-as-alone", "ok", text)
        return
    shared = len({model.device for model in contention.models}) < len(contention.models)
    hint = "give each a device of its own" if shared else None
    if all(model.threads is not None for model in contention.models):
        hint = "they share caches and memory bandwidth: fewer at once, or a smaller form of the weights"
    text = f"at once models run slower than alone, {PHRASES[way]} too: {_ratios(contention, slower)}"
    yield Finding("slower-than-alone", "note", text, hint)


def _beaten(contention: Contention, *, by: Situation, in_: Situation) -> list[int]:
    """Returns the models whose runs in one situation take longer than in another, beyond the noise."""
    return [
        index
        for index in range(len(contention.models))
        if is_below((runs := contention.medians(index))[by], runs[in_], min_gain=_MIN_SLOW_DOWN)
    ]


def _ratios(contention: Contention, models: Sequence[int]) -> str:
    return "; ".join(
        f"{contention.models[index].name} ({phrase_medians(contention.medians(index))})" for index in models
    )
