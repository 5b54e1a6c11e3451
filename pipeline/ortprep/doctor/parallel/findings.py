"""Records of sessions at once and of workers, and findings about them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.parallel.gil import (
    Call,
    GilObservations,
    clearest,
    judge_creation,
    judge_run,
    min_call_ms,
)
from ortprep.doctor.parallel.sessions import GroupFigures
from ortprep.measuring.change import format_value
from ortprep.measuring.comparison import MIN_ROUNDS, is_below, paired_ratio
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


RELEASED_FROM = "1.31"
"""First ONNX Runtime that lets other threads run while it makes a session (microsoft/onnxruntime #27063)."""

MIN_GAIN = 0.05
"""Smallest relative difference that is worth a change, noise or not."""

MIN_SLOW_DOWN = 0.1
"""Smallest relative slow-down of a run that is called contention, noise or not."""

_NOT_PROMISED = (
    "ONNX Runtime does not promise that sessions on one device can be made at once "
    "(microsoft/onnxruntime #27089), so this package's load has threads take turns there"
)


def find_in(run: ParallelRun) -> tuple[Finding, ...]:
    """Returns the findings, topic by topic."""
    topics: tuple[Callable[[ParallelRun], Iterator[Finding]], ...] = (
        _find_failures,
        _find_soonest_way,
        _find_contention,
        _find_thread_costs,
        _find_lock,
    )
    return tuple(finding for topic in topics for finding in topic(run))


def _find_failures(run: ParallelRun) -> Iterator[Finding]:
    """Yields what could not be measured, or not often enough."""
    for way, reason in run.ways.failures.items():
        text = f"{len(run.models)} sessions {PHRASES[way]} failed: {reason}"
        if way == "threads" and run.has_shared_device:
            yield Finding("way-failed", "note", f"{text}; {_NOT_PROMISED}", "fewer at once")
        else:
            yield Finding("way-failed", "problem", text, "fewer at once")
    for name, reason in ({} if run.workers is None else run.workers.failures).items():
        yield Finding("way-failed", "problem", f"{name}, failed: {reason}", "fewer at once")
    for runs in (run.ways, run.workers):
        if runs is None or not run.models or runs.completed >= MIN_ROUNDS:
            continue
        if runs.completed or not runs.failures:
            text = (
                f"a round takes up to {runs.round_s / 60:.0f} minutes, so there were {runs.completed} "
                f"instead of {MIN_ROUNDS}: too few to tell a difference from noise"
            )
            yield Finding("rounds-cut", "note", text, "compare a smaller model of the same kind")


# Making sessions.


def choose_soonest(figures: Mapping[Way, Sequence[float]]) -> Way:
    """Returns the simplest way that no other one beats beyond the noise and by what is worth it.

    Args:
        figures: Per way, one figure a round, smaller is better; at least one way.
    """
    ways = [way for way in WAYS if way in figures]
    unbeaten = [
        way
        for way in ways
        if not any(is_below(figures[other], figures[way], min_gain=MIN_GAIN) for other in ways)
    ]
    # Noise may have them beat each other in a circle; then the smallest median has it.
    return unbeaten[0] if unbeaten else min(ways, key=lambda way: median(figures[way]))


def _describe(figures: Mapping[Way, Sequence[float]]) -> str:
    """Returns the median of every way in words."""
    return ", ".join(f"{format_value(median(values))} ms {PHRASES[way]}" for way, values in figures.items())


def _find_soonest_way(run: ParallelRun) -> Iterator[Finding]:
    """Yields which way has all sessions ready soonest, the start of its processes included."""
    ready = run.read(lambda figures: figures.ready_ms)
    if not ready:
        return
    soonest = choose_soonest(ready)
    text = (
        f"{len(run.models)} sessions are ready soonest {PHRASES[soonest]}, processes' start included: "
        f"{_describe(ready)}"
    )
    if soonest == "processes":
        yield Finding("soonest-way", "advice", text, _pool(run))
    elif soonest == "sequential":
        yield Finding("soonest-way", "note", f"{text}; no other way gains beyond the noise")
    elif run.has_shared_device:
        safe = f"a process each is safe: {_pool(run)}"
        yield Finding("soonest-way", "note", f"{text}; but {_NOT_PROMISED}", safe)
    else:
        hint = "load in threads, one per device: concurrent.futures.ThreadPoolExecutor"
        yield Finding("soonest-way", "advice", text, hint)


def _pool(run: ParallelRun) -> str:
    """Returns the call that serves the models from processes."""
    names = dict.fromkeys(model.name.partition(" #")[0] for model in run.models)
    devices = {model.device for model in run.models}
    bundles = "{" + ", ".join(f'"{name}": "artifacts/{name}"' for name in names) + "}"
    what = bundles if len(names) > 1 else '"artifacts/NAME"'
    if len(devices) > 1 or len(names) > 1:
        return f"SessionPool({what})"
    config = f'PoolConfig(devices=["{devices.pop()}"], workers_per_device={len(run.models)})'
    return f"SessionPool({what}, {config})"


# Running them.


def slow_down(run: ParallelRun, index: int, way: Way) -> float:
    """Returns how many times longer a model's runs take than alone, in ways that were measured."""
    figures = run.runs_of(index)
    return paired_ratio(figures[way], figures["sequential"])


def _find_contention(run: ParallelRun) -> Iterator[Finding]:
    """Yields the models whose runs take longer at once, by threads or by what processes share too."""
    measured = run.read(lambda figures: figures.ready_ms).keys()
    models = range(len(run.models))
    runs = [run.runs_of(index) for index in models]

    def name_slower(than: Way, way: Way) -> str:
        slower = [i for i in models if is_below(runs[i][than], runs[i][way], min_gain=MIN_SLOW_DOWN)]
        return "; ".join(f"{run.models[i].name} ({_describe(runs[i])})" for i in slower)

    if {"threads", "processes"} <= measured and (slower := name_slower("processes", "threads")):
        text = f"models run slower in threads of one process than in a process each: {slower}"
        yield Finding("threads-contend", "advice", text, _pool(run))
    at_once = [way for way in WAYS[1:] if {way, "sequential"} <= measured]
    if not at_once:
        return
    # The way in which the model that suffers most suffers least: no choice between them removes the rest.
    better = min(at_once, key=lambda way: max(slow_down(run, index, way) for index in models))
    if slower := name_slower("sequential", better):
        text = f"at once models run slower than alone, {PHRASES[better]} too: {slower}"
        on_cpu = all(model.threads is not None for model in run.models)
        shared = "they share caches and memory bandwidth: fewer at once, or a smaller form of the weights"
        yield Finding(
            "slower-than-alone", "note", text, shared if on_cpu else "give each a device of its own"
        )
    else:
        text = f"no model runs slower at once {PHRASES[better]} than alone, beyond the noise"
        yield Finding("as-fast-as-alone", "ok", text)


# Workers, and the threads that each should have.


def _find_thread_costs(run: ParallelRun) -> Iterator[Finding]:
    """Yields what ONNX Runtime's default number of threads costs workers, the worst first."""
    if run.workers is None or run.workers.completed < MIN_ROUNDS:
        return
    speeds = {
        setup: [one.runs_per_s for one in run.workers.rounds[str(setup)]]
        for setup in run.setups
        if str(setup) in run.workers.rounds
    }
    costs: list[tuple[float, WorkerSetup, str]] = []
    for setup, limited in speeds.items():
        default = speeds.get(WorkerSetup(setup.workers, None))
        if setup.threads is not None and default and is_below(default, limited, min_gain=MIN_GAIN):
            gain = paired_ratio(limited, default)
            text = f"{setup}: {median(limited):.3g} runs per s, {gain:.2f}× of {median(default):.3g}"
            costs.append((gain, setup, f"{text} with default threads"))
    if not costs:
        text = "ONNX Runtime's default number of threads costs no speed here, beyond the noise"
        yield Finding("default-threads-as-good", "ok", text)
        return
    costs.sort(key=lambda cost: -cost[0])
    worst = costs[0][1]
    hint = f"SessionOptions.intra_op_num_threads = {worst.threads:d}; `load` sets it"
    if worst.workers > 1:
        hint += f" where ORTPREP_WORKERS={worst.workers} is in the environment of each worker"
    text = "ONNX Runtime's default number of threads is that of the machine's cores, and costs speed here"
    yield Finding("default-threads-cost", "advice", f"{text}: {'; '.join(one[2] for one in costs)}", hint)


# The interpreter's lock.


def _find_lock(run: ParallelRun) -> Iterator[Finding]:
    """Yields whether other Python threads run while ONNX Runtime makes a session, and while it runs one."""
    gil, unclear = run.gil, []
    version = f"ONNX Runtime {gil.onnxruntime}"
    phases = (("makes a session", gil.create, judge_creation(gil)), ("runs one", gil.run, judge_run(gil)))
    for what, calls, verdict in phases:
        gap = _gap(calls)
        if verdict == "held":
            text = (
                f"{version} keeps the interpreter to itself while it {what}: no other thread ran for {gap}; "
                "threads take turns"
            )
            if what == "runs one":
                hint = (
                    'serve from processes, which do not share an interpreter: SessionPool("artifacts/NAME")'
                )
                yield Finding("gil-held", "problem", text, hint)
            else:
                hint = (
                    f"install ONNX Runtime {RELEASED_FROM} or later, "
                    'or load in processes: SessionPool("artifacts/NAME")'
                )
                yield Finding("gil-held", "advice", text, hint)
        elif verdict == "released":
            text = f"{version} lets other threads run while it {what}: the longest gap was {gap}"
            yield Finding("gil-released", "ok", text)
        else:
            unclear.append(f"{gap} as it {what}")
    if unclear:
        text = (
            f"cannot tell who holds the interpreter: gaps of {', '.join(unclear)}; on this machine a call "
            f"needs at least {min_call_ms(gil.released):.0f} ms to tell, and one known to release it had a "
            f"gap of {clearest(gil.released).gap_share:.0%} of its length"
        )
        yield Finding("gil-unclear", "note", text, "ortprep doctor parallel, when the machine is less busy")


def _gap(calls: Sequence[Call]) -> str:
    call = clearest(calls)
    return f"{call.longest_gap_ms:.1f} of {call.elapsed_ms:.1f} ms"
