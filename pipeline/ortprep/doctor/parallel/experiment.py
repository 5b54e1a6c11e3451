"""`doctor parallel`: makes and runs sessions at once, in three ways, and several workers of one model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from ortprep.bundle.codec import encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.doctor.diagnosis import Diagnosis, diagnose
from ortprep.doctor.doctor_model import DoctorModel, guard_device, plan_of, with_threads
from ortprep.doctor.parallel.findings import (
    PHRASES,
    WAYS,
    ParallelRun,
    PlacedModel,
    Way,
    WorkerSetup,
    find_in,
)
from ortprep.doctor.parallel.gil import (
    Call,
    GilObservations,
    Verdict,
    clearest,
    judge_creation,
    judge_run,
    observe_gil,
)
from ortprep.doctor.parallel.sessions import GroupFigures, Load, measure_group
from ortprep.measuring.comparison import MIN_ROUNDS, paired_ratio
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.measuring.rounds import InterleavedRuns, run_interleaved
from ortprep.runtime.machine.cores import find_thread_limit, usable_cores
from ortprep.tables import Table, fill_table

MAX_COMPARISON_S = 1800.0
"""Seconds that the first `MIN_ROUNDS` rounds may take together; a longer comparison is cut."""

WORKERS = (1, 2, 4)
_MAX_ON_CPU = 4
_MAX_ROUNDS = 7
_BUDGET_S = 7.0


def diagnose_parallel(
    subjects: Sequence[DoctorModel] = (),
    *,
    devices: Sequence[str],
    sessions: int | None = None,
    seconds: float = 1.5,
) -> Diagnosis:
    """Makes and runs several sessions in three ways, in fresh processes, in interleaved rounds.

    A single model on the CPU is also served by 1, 2 and 4 workers, with ONNX Runtime's default number of
    threads and with the number that `load` sets. Without a model only the interpreter's lock is watched.

    Args:
        subjects: Models; a source goes before its bundle. Of a single one several sessions are made.
        devices: `cpu`, `cuda:0`, …: sessions are put on them in turn.
        sessions: Sessions of a single model; None for one per GPU, or on the CPU one per core, two to four.
        seconds: Time that each way is run, all rounds together.

    Returns:
        Also where a way fails: that is a finding.

    Raises:
        LoadError: Not even one session can be made and run, or no variant of a bundle runs on its device.
        ChildError: The process that makes one died.
        BundleError: A bundle cannot be read.
        StageError: The folder of the device's lock cannot be trusted, or this thread measures already.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    cores, window_s = usable_cores(), seconds / MIN_ROUNDS
    chosen = list(subjects)
    if len(chosen) == 1:
        chosen *= sessions or count_sessions(devices, cores)
    models = place_models([one.name for one in chosen], devices, cores=cores)
    loads = [
        (_plan(one, model.device, model.threads), one.sample)
        for one, model in zip(chosen, models, strict=True)
    ]
    # A measurement holds the CPU whatever its device: one device's lock keeps all others out.
    with guard_device(devices[0]):
        ways = _measure_ways(loads, window_s) if loads else InterleavedRuns[Way, GroupFigures]({}, {}, 0.0)
        setups: tuple[WorkerSetup, ...] = ()
        if len(subjects) == 1 and devices[0] == CPU_DEVICE:
            setups = plan_workers(WORKERS)
        workers = _measure_workers(subjects[0], setups, window_s) if setups else None
        gil = observe_gil(devices[0])
    lanes = cores if set(devices) == {CPU_DEVICE} else len(set(devices))
    run = ParallelRun(models, lanes, ways, setups, workers, gil)
    verdicts = {"create": judge_creation(gil), "run": judge_run(gil)}
    return diagnose(
        "parallel",
        find_in(run),
        subject=", ".join(dict.fromkeys(subject.name for subject in subjects)),
        tables=build_tables(run),
        figures={**encode(run), "verdicts": verdicts},
    )


def count_sessions(devices: Sequence[str], cores: int) -> int:
    """Returns how many sessions to try: one per GPU, or on the CPU one per core; two to four there. Pure."""
    if set(devices) == {CPU_DEVICE}:
        return min(_MAX_ON_CPU, max(2, cores))
    return max(2, len(devices))


def place_models(names: Sequence[str], devices: Sequence[str], *, cores: int) -> tuple[PlacedModel, ...]:
    """Puts models on devices in turn, and divides the cores between those on the CPU. Pure.

    Args:
        names: Names of the models; one that occurs twice is numbered.
        devices: At least one.
        cores: Usable cores of the CPU.
    """
    placed = [devices[index % len(devices)] for index in range(len(names))]
    threads = max(1, cores // max(1, placed.count(CPU_DEVICE)))
    numbered = [
        name if names.count(name) == 1 else f"{name} #{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]
    return tuple(
        PlacedModel(name, device, threads if device == CPU_DEVICE else None)
        for name, device in zip(numbered, placed, strict=True)
    )


def plan_workers(counts: Sequence[int]) -> tuple[WorkerSetup, ...]:
    """Returns workers with ONNX Runtime's default threads, and with as many threads as `load` sets."""
    setups = []
    for count in counts:
        setups.append(WorkerSetup(count, None))
        limit = find_thread_limit({"ORTPREP_WORKERS": str(count)})
        if limit is not None:
            setups.append(WorkerSetup(count, limit[0]))
    return tuple(setups)


def _plan(subject: DoctorModel, device: str, threads: int | None) -> SessionPlan:
    plan = plan_of(subject, device)
    return plan if threads is None else with_threads(plan, threads)


def _measure_ways(loads: Sequence[Load], window_s: float) -> InterleavedRuns[Way, GroupFigures]:
    """Measures every way to make and run the sessions."""
    # These do not count: they bring the files into memory, say soon whether the models can be loaded and run
    # at all, and show how long it takes to load them so many times.
    begun_s = time.monotonic()
    for load in {str(load): load for load in loads}.values():
        measure_group([[load]], at_once=False, window_s=0.0)
    once_s = time.monotonic() - begun_s

    def measure(way: Way) -> GroupFigures:
        shares = [[load] for load in loads] if way == "processes" else [loads]
        return measure_group(shares, at_once=way != "sequential", window_s=window_s)

    return run_interleaved(
        WAYS,
        measure,
        estimate_s=len(WAYS) * len(loads) * once_s,
        max_rounds=_MAX_ROUNDS,
        max_comparison_s=MAX_COMPARISON_S,
        budget_s=_BUDGET_S,
    )


def _measure_workers(
    subject: DoctorModel, setups: Sequence[WorkerSetup], window_s: float
) -> InterleavedRuns[str, GroupFigures]:
    """Measures every setup of workers, by its text."""
    by_name = {str(setup): setup for setup in setups}

    def measure(name: str) -> GroupFigures:
        setup = by_name[name]
        # 0 is ONNX Runtime's own choice, whatever a bundle records.
        load = (_plan(subject, CPU_DEVICE, setup.threads or 0), subject.sample)
        return measure_group([[load]] * setup.workers, at_once=True, window_s=window_s)

    return run_interleaved(tuple(by_name), measure, max_comparison_s=MAX_COMPARISON_S)


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
    """Returns the setups of workers, as medians of all rounds."""
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
    """Returns the clearest call of each phase."""
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
