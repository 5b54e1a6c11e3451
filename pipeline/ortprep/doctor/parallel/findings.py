"""What sessions at once show about threads and processes, and workers about their threads: rules. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from ortprep.doctor.diagnosis import Finding, Found, Rules
from ortprep.doctor.parallel.gil import Call, Verdict, clearest, judge_creation, judge_run, min_call_ms
from ortprep.doctor.parallel.run import PHRASES, WAYS, ParallelRun, Way, WorkerSetup
from ortprep.measuring.change import format_value
from ortprep.measuring.comparison import MIN_ROUNDS, is_below, paired_ratio

RELEASED_FROM = "1.31"
"""First ONNX Runtime that lets other threads run while it makes a session (microsoft/onnxruntime #27063)."""

MIN_GAIN = 0.05
"""Smallest relative difference that is worth a change, noise or not."""

MIN_SLOW_DOWN = 0.1
"""Smallest relative slow-down of a run that is called contention, noise or not."""

_UPGRADE = f"install ONNX Runtime {RELEASED_FROM} or later"
_NOT_PROMISED = (
    "ONNX Runtime does not promise that sessions on one device can be made at once "
    "(microsoft/onnxruntime #27089), so this package's load has threads take turns there"
)


rule: Rules[ParallelRun] = Rules()
"""Makes a function a rule about the measurements."""


def find_in(run: ParallelRun) -> tuple[Finding, ...]:
    """Returns the findings."""
    return rule.find(run)


# Whether everything could be measured.


@rule("way-failed", "problem", hint="fewer at once")
def _failed_ways(run: ParallelRun) -> Iterator[Found]:
    for way, reason in run.ways.failures.items():
        text = f"{len(run.models)} sessions {PHRASES[way]} failed: {reason}"
        if way == "threads" and run.has_shared_device:
            yield Found(f"{text}; {_NOT_PROMISED}", severity="note")
        else:
            yield Found(text)
    for name, reason in ({} if run.workers is None else run.workers.failures).items():
        yield Found(f"{name}, failed: {reason}")


@rule("rounds-cut", "note", hint="compare a smaller model of the same kind")
def _cut_rounds(run: ParallelRun) -> Iterator[str]:
    for runs in (run.ways, run.workers):
        if runs is None or not run.models or runs.completed >= MIN_ROUNDS:
            continue
        if runs.completed or not runs.failures:
            yield (
                f"a round takes up to {runs.round_s / 60:.0f} minutes, so there were {runs.completed} "
                f"instead of {MIN_ROUNDS}: too few to tell a difference from noise"
            )


# Making sessions.


def find_soonest(figures: Mapping[Way, Sequence[float]]) -> Way:
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


def describe(figures: Mapping[Way, Sequence[float]]) -> str:
    """Returns the median of every way in words."""
    return ", ".join(f"{format_value(median(values))} ms {PHRASES[way]}" for way, values in figures.items())


@rule("soonest-way", "note")
def _soonest(run: ParallelRun) -> Iterator[Found]:
    """Which way has all sessions ready soonest, the start of its processes included."""
    ready = run.read(lambda figures: figures.ready_ms)
    if not ready:
        return
    soonest = find_soonest(ready)
    text = (
        f"{len(run.models)} sessions are ready soonest {PHRASES[soonest]}, processes' start included: "
        f"{describe(ready)}"
    )
    if soonest == "processes":
        yield Found(text, _pool(run), "advice")
    elif soonest == "sequential":
        yield Found(f"{text}; no other way gains beyond the noise")
    elif run.has_shared_device:
        yield Found(f"{text}; but {_NOT_PROMISED}", f"a process each is safe: {_pool(run)}")
    else:
        hint = "load in threads, one per device: concurrent.futures.ThreadPoolExecutor"
        yield Found(text, hint, "advice")


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


def _slower(run: ParallelRun, *, than: Way, way: Way) -> list[int]:
    """Returns the models whose runs take longer in one way than in another, beyond the noise."""
    if not {than, way} <= run.read(lambda figures: figures.ready_ms).keys():
        return []
    figures = map(run.runs_of, range(len(run.models)))
    return [
        index for index, one in enumerate(figures) if is_below(one[than], one[way], min_gain=MIN_SLOW_DOWN)
    ]


def _name_runs(run: ParallelRun, models: Sequence[int]) -> str:
    return "; ".join(f"{run.models[index].name} ({describe(run.runs_of(index))})" for index in models)


@rule("threads-contend", "advice")
def _threads_contend(run: ParallelRun) -> Iterator[Found]:
    if slower := _slower(run, than="processes", way="threads"):
        text = "models run slower in threads of one process than in a process each: "
        yield Found(text + _name_runs(run, slower), _pool(run))


@rule("as-fast-as-alone", "ok")
def _as_fast_as_alone(run: ParallelRun) -> Iterator[str]:
    for way in _better_way(run):
        if not _slower(run, than="sequential", way=way):
            yield f"no model runs slower at once {PHRASES[way]} than alone, beyond the noise"


@rule("slower-than-alone", "note", hint="give each a device of its own")
def _slower_than_alone(run: ParallelRun) -> Iterator[Found]:
    """Models that slow each other down even the better way: no choice between the ways mends that."""
    for way in _better_way(run):
        if slower := _slower(run, than="sequential", way=way):
            text = f"at once models run slower than alone, {PHRASES[way]} too: {_name_runs(run, slower)}"
            on_cpu = all(model.threads is not None for model in run.models)
            shared = "they share caches and memory bandwidth: fewer at once, or a smaller form of the weights"
            yield Found(text, shared if on_cpu else None)


def _better_way(run: ParallelRun) -> tuple[Way, ...]:
    """Returns the way at once in which the model that suffers most suffers least; none if not known."""
    measured = run.read(lambda figures: figures.ready_ms)
    ways = [way for way in WAYS[1:] if {way, "sequential"} <= measured.keys()]
    models = range(len(run.models))
    return tuple(sorted(ways, key=lambda way: max(slow_down(run, index, way) for index in models))[:1])


# Workers, and the threads that each should have.


def _per_second(run: ParallelRun) -> dict[WorkerSetup, list[float]]:
    """Returns runs per second of every setup, round by round."""
    if run.workers is None or run.workers.completed < MIN_ROUNDS:
        return {}
    rounds = run.workers.rounds
    return {
        setup: [one.runs_per_s for one in rounds[str(setup)]] for setup in run.setups if str(setup) in rounds
    }


def _costs(run: ParallelRun) -> list[tuple[float, WorkerSetup]]:
    """Returns how many times faster each limited setup is than default threads, the worst first."""
    speeds = _per_second(run)
    costs = []
    for setup, limited in speeds.items():
        default = speeds.get(WorkerSetup(setup.workers, None))
        if setup.threads is None or default is None:
            continue
        if is_below(default, limited, min_gain=MIN_GAIN):
            costs.append((paired_ratio(limited, default), setup))
    return sorted(costs, key=lambda cost: -cost[0])


@rule("default-threads-cost", "advice")
def _default_threads_cost(run: ParallelRun) -> Iterator[Found]:
    costs, speeds = _costs(run), _per_second(run)
    if costs:
        parts = [
            f"{setup}: {median(speeds[setup]):.3g} runs per s, {gain:.2f}× of "
            f"{median(speeds[WorkerSetup(setup.workers, None)]):.3g} with default threads"
            for gain, setup in costs
        ]
        worst = costs[0][1]
        hint = f"SessionOptions.intra_op_num_threads = {worst.threads:d}; `load` sets it"
        if worst.workers > 1:
            hint += f" where ORTPREP_WORKERS={worst.workers} is in the environment of each worker"
        text = "ONNX Runtime's default number of threads is that of the machine's cores, and costs speed here"
        yield Found(f"{text}: {'; '.join(parts)}", hint)


@rule("default-threads-as-good", "ok")
def _default_threads_as_good(run: ParallelRun) -> Iterator[str]:
    if _per_second(run) and not _costs(run):
        yield "ONNX Runtime's default number of threads costs no speed here, beyond the noise"


# The interpreter's lock.


@rule("gil-held", "advice", hint=f'{_UPGRADE}, or load in processes: SessionPool("artifacts/NAME")')
def _held(run: ParallelRun) -> Iterator[Found]:
    for what, calls, verdict in _phases(run):
        if verdict == "held":
            text = (
                f"ONNX Runtime {run.gil.onnxruntime} keeps the interpreter to itself while it {what}: no "
                f"other thread ran for {_gap(calls)}; threads take turns"
            )
            is_run = calls is run.gil.run
            hint = 'serve from processes, which do not share an interpreter: SessionPool("artifacts/NAME")'
            yield Found(text, hint if is_run else None, "problem" if is_run else None)


@rule("gil-released", "ok")
def _released(run: ParallelRun) -> Iterator[str]:
    for what, calls, verdict in _phases(run):
        if verdict == "released":
            version = f"ONNX Runtime {run.gil.onnxruntime}"
            yield f"{version} lets other threads run while it {what}: the longest gap was {_gap(calls)}"


@rule("gil-unclear", "note", hint="ortprep doctor parallel, when the machine is less busy")
def _unclear(run: ParallelRun) -> Iterator[str]:
    gil = run.gil
    gaps = [f"{_gap(calls)} as it {what}" for what, calls, verdict in _phases(run) if verdict == "unclear"]
    if gaps:
        yield (
            f"cannot tell who holds the interpreter: gaps of {', '.join(gaps)}; on this machine a call needs "
            f"at least {min_call_ms(gil.released):.0f} ms to tell, and one known to release it had a gap of "
            f"{clearest(gil.released).gap_share:.0%} of its length"
        )


def _phases(run: ParallelRun) -> Iterator[tuple[str, Sequence[Call], Verdict]]:
    """Yields what ONNX Runtime did, the calls, and who held the lock."""
    yield "makes a session", run.gil.create, judge_creation(run.gil)
    yield "runs one", run.gil.run, judge_run(run.gil)


def _gap(calls: Sequence[Call]) -> str:
    call = clearest(calls)
    return f"{call.longest_gap_ms:.1f} of {call.elapsed_ms:.1f} ms"
