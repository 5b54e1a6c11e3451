"""What figures of models alone, in threads and in processes say of contention. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal

from pipeline.diagnose.diagnosis import Cell, Finding, Table
from pipeline.diagnose.turns import explain_cut
from pipeline.measuring.comparison import LEAST_ROUNDS, beats, paired_ratio

Situation = Literal["alone", "threads", "processes"]
SITUATIONS: tuple[Situation, ...] = ("alone", "threads", "processes")

_LEAST = 0.1
"""Slower by less than this share is not called contention, noise or not."""

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
        threads: Threads of its operators, the same in every situation; None unless it is on the CPU.
    """

    name: str
    device: str
    threads: int | None


@dataclass(frozen=True)
class Contention:
    """What was measured.

    Attributes:
        models: Those that run at once.
        onnxruntime: Version; "" if the models could not even be run alone.
        rounds: Per situation that was measured in every round, per round what each model did.
        failures: Per situation that failed, why.
        round_s: What a round took, or by estimate takes where none was begun.
    """

    models: tuple[Model, ...]
    onnxruntime: str
    rounds: Mapping[Situation, tuple[tuple[Ran, ...], ...]]
    failures: Mapping[Situation, str]
    round_s: float


def slow_down(contention: Contention, index: int, situation: Situation) -> float | None:
    """Returns how many times longer a model's runs take than alone; None where either was not measured.

    Args:
        contention: What was measured.
        index: Of the model.
        situation: Beside the others in threads, or in processes.
    """
    if situation not in contention.rounds or "alone" not in contention.rounds:
        return None
    return paired_ratio(medians(contention, index, situation), medians(contention, index, "alone"))


def medians(contention: Contention, index: int, situation: Situation) -> list[float]:
    """Returns a model's median run in every round, in milliseconds."""
    return [models[index].median_ms for models in contention.rounds[situation]]


def find_in(contention: Contention) -> tuple[Finding, ...]:
    """Returns what to say of it."""
    done = min((len(rounds) for rounds in contention.rounds.values()), default=0)
    if not done and contention.failures:
        reason = next(iter(contention.failures.values()))
        text = f"{_list(contention)} could not be run, neither alone nor at once: {reason}"
        return (Finding("concurrent-not-measured", "problem", text),)
    failed = [
        _explain_failure(contention, situation)
        for situation in SITUATIONS
        if situation in contention.failures
    ]
    if done < LEAST_ROUNDS:
        return (*failed, explain_cut(done, contention.round_s))
    return (*failed, *_compare_ways(contention), *_compare_alone(contention), *_explain_threads(contention))


def tabulate(contention: Contention) -> Table:
    """Returns every model in every situation; medians of all rounds' runs."""
    rows = tuple(
        _row(contention, index, situation)
        for index in range(len(contention.models))
        for situation in SITUATIONS
        if situation in contention.rounds
    )
    return Table(
        f"{len(contention.models)} models at once",
        ("model", "device", "runs", "median ms", "p99 ms", "runs per s", "times alone", "thread's CPU share"),
        rows,
    )


def percentile_99(values: Sequence[float]) -> float:
    """Returns the 99th percentile, interpolated between neighbours."""
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def _row(contention: Contention, index: int, situation: Situation) -> tuple[Cell, ...]:
    rounds = [models[index] for models in contention.rounds[situation]]
    runs = [run_ms for ran in rounds for run_ms in ran.run_ms]
    slower = None if situation == "alone" else slow_down(contention, index, situation)
    return (
        contention.models[index].name,
        contention.models[index].device,
        _SAY[situation],
        round(median(runs), 2),
        round(percentile_99(runs), 2),
        round(len(runs) / sum(runs) * 1e3, 1),
        None if slower is None else round(slower, 2),
        round(median([ran.cpu_share for ran in rounds]), 2),
    )


def _explain_failure(contention: Contention, situation: Situation) -> Finding:
    how = "each alone" if situation == "alone" else f"at once {_SAY[situation]}"
    text = f"{_list(contention)} could not be run {how}: {contention.failures[situation]}"
    return Finding("situation-failed", "problem", text)


def _compare_ways(contention: Contention) -> tuple[Finding, ...]:
    if "threads" not in contention.rounds or "processes" not in contention.rounds:
        return ()
    slower = _beaten(contention, by="processes", in_="threads")
    if slower:
        return (
            Finding(
                "threads-contend",
                "advice",
                f"in threads of one process models run slower than in a process each: "
                f"{_ratios(contention, slower, 'threads', 'processes')}",
                'a process per device: SessionPool({"a": "artifacts/A", "b": "artifacts/B"}, devices="all")',
            ),
        )
    faster = _beaten(contention, by="threads", in_="processes")
    if faster:
        text = (
            "in a process each models run slower than in threads of one process: "
            f"{_ratios(contention, faster, 'processes', 'threads')}"
        )
        return (Finding("processes-contend", "note", text, "run them in threads of one process"),)
    text = (
        "no model runs slower in threads of one process than in a process each, beyond the noise: "
        f"{_ratios(contention, range(len(contention.models)), 'threads', 'processes')}"
    )
    return (Finding("threads-as-fast", "good", text),)


def _compare_alone(contention: Contention) -> tuple[Finding, ...]:
    """Says whether models slow each other down even the better way, which no choice between them mends."""
    ways = [way for way in SITUATIONS if way != "alone" and way in contention.rounds]
    if "alone" not in contention.rounds or not ways:
        return ()
    way = min(ways, key=lambda way: max(_slow_downs(contention, way)))
    slower = _beaten(contention, by="alone", in_=way)
    if not slower:
        ratios = _ratios(contention, _all(contention), way, "alone")
        text = f"at once {_SAY[way]} no model runs slower than alone beyond the noise: {ratios}"
        return (Finding("as-fast-as-alone", "good", text),)
    shared = len({model.device for model in contention.models}) < len(contention.models)
    hint = "give each a device of its own" if shared else None
    if all(model.threads is not None for model in contention.models):
        hint = "they share caches and memory bandwidth: fewer at once, or a smaller form of the weights"
    text = (
        f"at once models run slower than alone, {_SAY[way]} too: {_ratios(contention, slower, way, 'alone')}"
    )
    return (Finding("slower-than-alone", "note", text, hint),)


def _explain_threads(contention: Contention) -> tuple[Finding, ...]:
    threads = {model.threads for model in contention.models if model.threads is not None}
    if not threads:
        return ()
    text = (
        f"on the CPU every model had {_plural(min(threads), 'thread')} in every situation, alone too, "
        "so that what is compared is the company and not the number of cores"
    )
    return (Finding("cores-divided", "note", text),)


def _slow_downs(contention: Contention, situation: Situation) -> list[float]:
    return [slow_down(contention, index, situation) or 1.0 for index in _all(contention)]


def _beaten(contention: Contention, *, by: Situation, in_: Situation) -> list[int]:
    """Returns the models whose runs in one situation take longer than in another, beyond the noise."""
    return [
        index
        for index in _all(contention)
        if beats(medians(contention, index, by), medians(contention, index, in_), least=_LEAST)
    ]


def _ratios(contention: Contention, models: Sequence[int], above: Situation, below: Situation) -> str:
    parts = []
    for index in models:
        times = medians(contention, index, above), medians(contention, index, below)
        parts.append(
            f"{contention.models[index].name} {paired_ratio(*times):.2f}× round by round "
            f"(medians {median(times[0]):.3g} ms {_SAY[above]}, {median(times[1]):.3g} ms {_SAY[below]})"
        )
    return "; ".join(parts)


def _all(contention: Contention) -> range:
    return range(len(contention.models))


def _list(contention: Contention) -> str:
    return ", ".join(model.name for model in contention.models)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
