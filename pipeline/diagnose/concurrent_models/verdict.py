"""Conclusions about models that run alone, in threads and in processes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal

from ortprep.diagnose.diagnosis import DiagnosisTable, Finding, TableCell
from ortprep.diagnose.interleaved_runs import explain_cut
from ortprep.measuring.comparison import MIN_ROUNDS, beats, paired_ratio
from ortprep.measuring.rounds import InterleavedRuns

Situation = Literal["alone", "threads", "processes"]
SITUATIONS: tuple[Situation, ...] = ("alone", "threads", "processes")

_MIN_SLOW_DOWN = 0.1
"""Smallest relative slow-down that is called contention, noise or not."""

_PHRASES: Mapping[Situation, str] = {
    "alone": "alone",
    "threads": "in threads of one process",
    "processes": "in a process each",
}


@dataclass(frozen=True)
class ModelRuns:
    """Runs of one model in one window.

    Attributes:
        run_ms: Duration of each run, in order; at least one.
        cpu_share: Processor time of the thread that ran it as a share of the time that went by.
    """

    run_ms: tuple[float, ...]
    cpu_share: float

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
        onnxruntime: Version; "" if the models could not even be run alone.
        situations: Runs of every model in each situation.
    """

    models: tuple[PlacedModel, ...]
    onnxruntime: str
    situations: InterleavedRuns[Situation, tuple[ModelRuns, ...]]

    def __str__(self) -> str:
        return ", ".join(model.name for model in self.models)


def slow_down(contention: Contention, index: int, situation: Situation) -> float | None:
    """Returns how many times longer a model's runs take than alone; None where either was not measured."""
    if not {situation, "alone"} <= contention.situations.rounds.keys():
        return None
    return paired_ratio(medians(contention, index, situation), medians(contention, index, "alone"))


def medians(contention: Contention, index: int, situation: Situation) -> list[float]:
    """Returns a model's median run in every round, in milliseconds."""
    return [models[index].median_ms for models in contention.situations.rounds[situation]]


def find_in(contention: Contention) -> tuple[Finding, ...]:
    """Returns the findings."""
    runs = contention.situations
    if not runs.completed and runs.failures:
        reason = next(iter(runs.failures.values()))
        text = f"{contention} could not be run, neither alone nor at once: {reason}"
        return (Finding("concurrent-not-measured", "problem", text),)
    failed = [_explain_failure(contention, each) for each in SITUATIONS if each in runs.failures]
    if runs.completed < MIN_ROUNDS:
        return (*failed, explain_cut(runs))
    return (*failed, *_compare_ways(contention), *_compare_alone(contention), *_explain_threads(contention))


def tabulate(contention: Contention) -> DiagnosisTable:
    """Returns every model in every situation; medians of all rounds' runs."""
    rows = tuple(
        _row(contention, index, situation)
        for index in range(len(contention.models))
        for situation in SITUATIONS
        if situation in contention.situations.rounds
    )
    return DiagnosisTable(
        f"{len(contention.models)} models at once",
        ("model", "device", "runs", "median ms", "p99 ms", "runs per s", "times alone", "thread's CPU share"),
        rows,
    )


def percentile_99(values: Sequence[float]) -> float:
    """Returns the 99th percentile, interpolated between neighbours."""
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def _row(contention: Contention, index: int, situation: Situation) -> tuple[TableCell, ...]:
    rounds = [models[index] for models in contention.situations.rounds[situation]]
    runs = [run_ms for ran in rounds for run_ms in ran.run_ms]
    slower = None if situation == "alone" else slow_down(contention, index, situation)
    return (
        contention.models[index].name,
        contention.models[index].device,
        _PHRASES[situation],
        round(median(runs), 2),
        round(percentile_99(runs), 2),
        round(len(runs) / sum(runs) * 1e3, 1),
        None if slower is None else round(slower, 2),
        round(median([ran.cpu_share for ran in rounds]), 2),
    )


def _explain_failure(contention: Contention, situation: Situation) -> Finding:
    how = "each alone" if situation == "alone" else f"at once {_PHRASES[situation]}"
    text = f"{contention} could not be run {how}: {contention.situations.failures[situation]}"
    return Finding("situation-failed", "problem", text)


def _compare_ways(contention: Contention) -> Iterator[Finding]:
    if not {"threads", "processes"} <= contention.situations.rounds.keys():
        return
    if slower := _beaten(contention, by="processes", in_="threads"):
        text = "in threads of one process models run slower than in a process each: "
        text += _ratios(contention, slower, "threads", "processes")
        hint = 'a process per device: SessionPool({"a": "artifacts/A", "b": "artifacts/B"})'
        yield Finding("threads-contend", "advice", text, hint)
    elif slower := _beaten(contention, by="threads", in_="processes"):
        text = "in a process each models run slower than in threads of one process: "
        text += _ratios(contention, slower, "processes", "threads")
        yield Finding("processes-contend", "note", text, "run them in threads of one process")
    else:
        text = "no model runs slower in threads of one process than in a process each, beyond the noise: "
        text += _ratios(contention, range(len(contention.models)), "threads", "processes")
        yield Finding("threads-as-fast", "good", text)


def _compare_alone(contention: Contention) -> Iterator[Finding]:
    """Yields whether models slow each other down even the better way, which no choice between them mends."""
    ways = [way for way in SITUATIONS[1:] if {way, "alone"} <= contention.situations.rounds.keys()]
    if not ways:
        return
    models = range(len(contention.models))
    way = min(ways, key=lambda way: max(slow_down(contention, index, way) or 1.0 for index in models))
    slower = _beaten(contention, by="alone", in_=way)
    ratios = _ratios(contention, slower or models, way, "alone")
    if not slower:
        text = f"at once {_PHRASES[way]} no model runs slower than alone beyond the noise: {ratios}"
        yield Finding("as-fast-as-alone", "good", text)
        return
    shared = len({model.device for model in contention.models}) < len(contention.models)
    hint = "give each a device of its own" if shared else None
    if all(model.threads is not None for model in contention.models):
        hint = "they share caches and memory bandwidth: fewer at once, or a smaller form of the weights"
    text = f"at once models run slower than alone, {_PHRASES[way]} too: {ratios}"
    yield Finding("slower-than-alone", "note", text, hint)


def _explain_threads(contention: Contention) -> Iterator[Finding]:
    threads = min((model.threads for model in contention.models if model.threads is not None), default=None)
    if threads is not None:
        text = (
            f"on the CPU every model had {threads} thread{'s' if threads > 1 else ''} in every situation, "
            "alone too, so that what is compared is the company and not the number of cores"
        )
        yield Finding("cores-divided", "note", text)


def _beaten(contention: Contention, *, by: Situation, in_: Situation) -> list[int]:
    """Returns the models whose runs in one situation take longer than in another, beyond the noise."""
    return [
        index
        for index in range(len(contention.models))
        if beats(medians(contention, index, by), medians(contention, index, in_), least=_MIN_SLOW_DOWN)
    ]


def _ratios(contention: Contention, models: Sequence[int], above: Situation, below: Situation) -> str:
    parts = []
    for index in models:
        slow_ms, fast_ms = medians(contention, index, above), medians(contention, index, below)
        at_median = f"{median(slow_ms):.3g} ms {_PHRASES[above]}, {median(fast_ms):.3g} ms {_PHRASES[below]}"
        ratio = f"{paired_ratio(slow_ms, fast_ms):.2f}× round by round"
        parts.append(f"{contention.models[index].name} {ratio} (medians {at_median})")
    return "; ".join(parts)
