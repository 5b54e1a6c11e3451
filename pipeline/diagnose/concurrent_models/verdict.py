"""What figures of models alone, in threads and in processes say of contention. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal

from pipeline.diagnose.diagnosis import Cell, Finding, Table
from pipeline.diagnose.parallel.verdict import beats
from pipeline.measuring.comparison import paired_ratio
from pipeline.measuring.device_lock import CPU_DEVICE

Situation = Literal["alone", "threads", "processes"]
SITUATIONS: tuple[Situation, ...] = ("alone", "threads", "processes")

_WORTH = 1.1
"""Slower by less than this is not called contention, noise or not."""

_SAY: Mapping[Situation, str] = {
    "alone": "alone",
    "threads": "in threads of one process",
    "processes": "in a process each",
}


@dataclass(frozen=True)
class Ran:
    """What one model did in one window.

    Attributes:
        run_ms: Each run, in order; at least one.
        cpu_share: Processor time of the thread that ran it by the time that went by: what is missing it spent
            waiting, for the device, a lock, the interpreter, a core, or threads of its operators.
    """

    run_ms: tuple[float, ...]
    cpu_share: float

    @property
    def median_ms(self) -> float:
        """Median run."""
        return median(self.run_ms)


@dataclass(frozen=True)
class Model:
    """One of the models that run at once.

    Attributes:
        name: For people.
        device: Where it runs: `cpu`, `cuda:0`, …
        threads: Threads of its operators on the CPU, the same in every situation; None on a GPU.
    """

    name: str
    device: str
    threads: int | None


@dataclass(frozen=True)
class Contest:
    """What was measured.

    Attributes:
        models: Those that run at once.
        onnxruntime: Version; "" if no situation could be measured.
        rounds: Per situation that was measured in every round, per round what each model did.
        failures: Per situation that failed, why.
    """

    models: tuple[Model, ...]
    onnxruntime: str
    rounds: Mapping[Situation, tuple[tuple[Ran, ...], ...]]
    failures: Mapping[Situation, str]


def slow_down(contest: Contest, index: int, situation: Situation) -> float | None:
    """Returns how many times longer a model's runs take than alone; None where either was not measured.

    Args:
        contest: What was measured.
        index: Of the model.
        situation: Beside the others in threads, or in processes.
    """
    if situation not in contest.rounds or "alone" not in contest.rounds:
        return None
    return paired_ratio(medians(contest, index, situation), medians(contest, index, "alone"))


def medians(contest: Contest, index: int, situation: Situation) -> list[float]:
    """Returns a model's median run in every round, in milliseconds."""
    return [models[index].median_ms for models in contest.rounds[situation]]


def find_in(contest: Contest) -> tuple[Finding, ...]:
    """Returns what to say of it."""
    if not contest.rounds:
        reason = next(iter(contest.failures.values()))
        text = f"{_list(contest)} could not be run, neither alone nor at once: {reason}"
        return (Finding("concurrent-not-measured", "problem", text),)
    failed = [
        _explain_failure(contest, situation) for situation in SITUATIONS if situation in contest.failures
    ]
    return (*failed, *_compare_ways(contest), *_compare_alone(contest), *_explain_threads(contest))


def tabulate(contest: Contest) -> Table:
    """Returns every model in every situation; medians of all rounds' runs."""
    rows = tuple(
        _row(contest, index, situation)
        for index in range(len(contest.models))
        for situation in SITUATIONS
        if situation in contest.rounds
    )
    return Table(
        f"{len(contest.models)} models at once",
        ("model", "device", "runs", "median ms", "p99 ms", "runs per s", "times alone", "thread's CPU share"),
        rows,
    )


def percentile_99(values: Sequence[float]) -> float:
    """Returns the 99th percentile, interpolated between neighbours."""
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def _row(contest: Contest, index: int, situation: Situation) -> tuple[Cell, ...]:
    rounds = [models[index] for models in contest.rounds[situation]]
    runs = [run_ms for ran in rounds for run_ms in ran.run_ms]
    slower = None if situation == "alone" else slow_down(contest, index, situation)
    return (
        contest.models[index].name,
        contest.models[index].device,
        _SAY[situation],
        round(median(runs), 2),
        round(percentile_99(runs), 2),
        round(len(runs) / sum(runs) * 1e3, 1),
        None if slower is None else round(slower, 2),
        round(median([ran.cpu_share for ran in rounds]), 2),
    )


def _explain_failure(contest: Contest, situation: Situation) -> Finding:
    how = "each alone" if situation == "alone" else f"at once {_SAY[situation]}"
    text = f"{_list(contest)} could not be run {how}: {contest.failures[situation]}"
    return Finding("situation-failed", "problem", text)


def _compare_ways(contest: Contest) -> tuple[Finding, ...]:
    if "threads" not in contest.rounds or "processes" not in contest.rounds:
        return ()
    slower = _beaten(contest, by="processes", in_="threads")
    if slower:
        return (
            Finding(
                "threads-contend",
                "advice",
                f"in threads of one process models run slower than in a process each: "
                f"{_ratios(contest, slower, 'threads', 'processes')}",
                'a process per device: SessionPool({"a": "artifacts/A", "b": "artifacts/B"}, devices="all")',
            ),
        )
    faster = _beaten(contest, by="threads", in_="processes")
    if faster:
        text = (
            "in a process each models run slower than in threads of one process: "
            f"{_ratios(contest, faster, 'processes', 'threads')}"
        )
        return (Finding("processes-contend", "note", text, "run them in threads of one process"),)
    text = (
        "no model runs slower in threads of one process than in a process each, beyond the noise: "
        f"{_ratios(contest, range(len(contest.models)), 'threads', 'processes')}"
    )
    return (Finding("threads-as-fast", "good", text),)


def _compare_alone(contest: Contest) -> tuple[Finding, ...]:
    """Says whether models slow each other down even the better way, which no choice between them mends."""
    ways = [way for way in SITUATIONS if way != "alone" and way in contest.rounds]
    if "alone" not in contest.rounds or not ways:
        return ()
    way = min(ways, key=lambda way: max(_slow_downs(contest, way)))
    slower = _beaten(contest, by="alone", in_=way)
    if not slower:
        ratios = _ratios(contest, _all(contest), way, "alone")
        text = f"at once {_SAY[way]} no model runs slower than alone beyond the noise: {ratios}"
        return (Finding("as-fast-as-alone", "good", text),)
    shared = len({model.device for model in contest.models}) < len(contest.models)
    hint = "give each a device of its own" if shared else None
    if all(model.device == CPU_DEVICE for model in contest.models):
        hint = "they share caches and memory bandwidth: fewer at once, or a smaller form of the weights"
    text = f"at once models run slower than alone, {_SAY[way]} too: {_ratios(contest, slower, way, 'alone')}"
    return (Finding("slower-than-alone", "note", text, hint),)


def _explain_threads(contest: Contest) -> tuple[Finding, ...]:
    threads = {model.threads for model in contest.models if model.threads is not None}
    if not threads:
        return ()
    text = (
        f"on the CPU every model had {_plural(min(threads), 'thread')} in every situation, alone too, "
        "so that what is compared is the company and not the number of cores"
    )
    return (Finding("cores-divided", "note", text),)


def _slow_downs(contest: Contest, situation: Situation) -> list[float]:
    return [slow_down(contest, index, situation) or 1.0 for index in _all(contest)]


def _beaten(contest: Contest, *, by: Situation, in_: Situation) -> list[int]:
    """Returns the models whose runs in one situation take longer than in another, beyond the noise."""
    return [
        index
        for index in _all(contest)
        if beats(medians(contest, index, by), medians(contest, index, in_), worth=_WORTH)
    ]


def _ratios(contest: Contest, models: Sequence[int], above: Situation, below: Situation) -> str:
    parts = []
    for index in models:
        times = medians(contest, index, above), medians(contest, index, below)
        parts.append(
            f"{contest.models[index].name} {paired_ratio(*times):.2f}× "
            f"({median(times[0]):.1f} ms {_SAY[above]}, {median(times[1]):.1f} ms {_SAY[below]})"
        )
    return "; ".join(parts)


def _all(contest: Contest) -> range:
    return range(len(contest.models))


def _list(contest: Contest) -> str:
    return ", ".join(model.name for model in contest.models)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
