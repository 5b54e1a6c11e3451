"""`doctor parallel MODEL`: what several workers serve, and what default threads cost them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

from ortprep.bundle.codec import encode
from ortprep.bundle.figures import Samples
from ortprep.doctor.diagnosis import Diagnosis, Finding, diagnose
from ortprep.doctor.doctor_model import DoctorModel, guard_device, plan_of, with_threads
from ortprep.doctor.worker_group import GroupFigures, measure_group
from ortprep.measuring.comparison import MIN_ROUNDS, InterleavedRuns, is_below, paired_ratio, run_interleaved
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.runtime.machine.processor import find_thread_limit
from ortprep.tables import CellValue, Table, count_of, fill_table

WORKERS = (1, 2, 4)
"""Numbers of workers that are tried."""

MIN_GAIN = 0.05
"""Smallest relative difference that is worth a change, noise or not."""

_BUDGET_S = 7.0
_MAX_ROUNDS = 7


class WorkerSetup(NamedTuple):
    """Workers of one model, with a session and a process each.

    Attributes:
        workers: Number of workers.
        threads: Threads of each for its operators, None for ONNX Runtime's default.
    """

    workers: int
    threads: int | None

    def __str__(self) -> str:
        threads = "default threads" if self.threads is None else f"{count_of(self.threads, 'thread')} each"
        return f"{count_of(self.workers, 'worker')}, {threads}"


Figures: TypeAlias = Mapping[WorkerSetup, Sequence[GroupFigures]]
"""Figures of each setup that was measured, one a round."""


def diagnose_parallel(subject: DoctorModel, *, seconds: float = 1.5) -> Diagnosis:
    """Makes and runs a session per worker at once on the CPU, in interleaved rounds of new processes.

    Args:
        subject: The model.
        seconds: Time that each setup is run, all rounds together.

    Raises:
        LoadError: Not even one session can be made and run, or no variant of a bundle runs here.
        ChildError: The process that makes one died.
        BundleError: A bundle cannot be read.
        CacheError: The folder of the device's lock cannot be trusted.
        StageError: This thread measures already.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    setups, plan = plan_workers(WORKERS), plan_of(subject, CPU_DEVICE)
    by_name, window_s = {str(setup): setup for setup in setups}, seconds / MIN_ROUNDS

    def measure(name: str) -> GroupFigures:
        workers, threads = by_name[name]
        # 0 is ONNX Runtime's own choice, whatever a bundle records.
        return measure_group(with_threads(plan, threads or 0), subject.sample, workers, window_s=window_s)

    with guard_device(CPU_DEVICE):
        # This one does not count: it brings the files into memory, and says soon whether the model can be
        # loaded and run at all.
        measure_group(plan, subject.sample, 1, window_s=0.0)
        runs = run_interleaved(tuple(by_name), measure, max_rounds=_MAX_ROUNDS, budget_s=_BUDGET_S)
    return diagnose(
        "parallel",
        find_in(runs, setups),
        subject=subject.name,
        tables=[build_table(runs, setups)],
        figures={"setups": [one._asdict() for one in setups], **encode(runs)},
    )


def plan_workers(counts: Sequence[int]) -> tuple[WorkerSetup, ...]:
    """Returns the setups to try.

    Each number of workers has ONNX Runtime's default threads and, if it differs, the number of threads that
    `load` sets.
    """
    setups: list[WorkerSetup] = []
    for count in counts:
        limit = find_thread_limit({"ORTPREP_WORKERS": str(count)})
        threads = None if limit is None else limit[0]
        setups += [WorkerSetup(count, number) for number in dict.fromkeys((None, threads))]
    return tuple(setups)


def build_table(runs: InterleavedRuns[str, GroupFigures], setups: Sequence[WorkerSetup]) -> Table:
    """Returns a row per setup, with its figures over all rounds."""

    def samples(read: Callable[[GroupFigures], float]) -> Callable[[WorkerSetup], CellValue]:
        return lambda setup: Samples.of(map(read, runs.rounds[str(setup)]))

    return fill_table(
        "workers on the CPU, all at once",
        [setup for setup in setups if str(setup) in runs.rounds],
        (
            ("workers", lambda setup: setup.workers),
            ("threads each", lambda setup: setup.threads or "default"),
            ("all ready ms", samples(lambda one: one.ready_ms)),
            ("runs per s", samples(lambda one: one.runs_per_s)),
            ("run ms", samples(lambda one: one.run_ms)),
            ("private MB", samples(lambda one: one.private_mb)),
        ),
    )


def find_in(runs: InterleavedRuns[str, GroupFigures], setups: Sequence[WorkerSetup]) -> tuple[Finding, ...]:
    """Returns what could not be measured, and what the rest shows. Pure."""
    figures = {setup: runs.rounds[str(setup)] for setup in setups if str(setup) in runs.rounds}
    return (*_find_failures(runs, setups), *_find_thread_costs(figures))


def _find_failures(
    runs: InterleavedRuns[str, GroupFigures], setups: Sequence[WorkerSetup]
) -> Iterator[Finding]:
    """Yields what could not be measured."""
    for setup in map(str, setups):
        if setup in runs.failures:
            text = f"{setup}, failed: {runs.failures[setup]}"
            yield Finding("workers-failed", "problem", text, "fewer at once")


def _find_thread_costs(figures: Figures) -> Iterator[Finding]:
    """Yields what ONNX Runtime's default number of threads costs processes, the worst first."""
    costs: list[tuple[float, WorkerSetup, str]] = []
    for setup in figures:
        default = WorkerSetup(setup.workers, None)
        if setup.threads is None or default not in figures:
            continue
        faster, text = _compare_speeds(figures, setup, default)
        if faster:
            costs.append((faster, setup, text))
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


def _compare_speeds(figures: Figures, one: WorkerSetup, other: WorkerSetup) -> tuple[float, str]:
    """Returns how many times more one setup serves, 0 if not beyond the noise, and that in words."""
    fast, slow = ([group.runs_per_s for group in figures[setup]] for setup in (one, other))
    ratio = paired_ratio(fast, slow)
    text = f"{one}: {median(fast):.3g} runs per s, {ratio:.2f}× of {median(slow):.3g} with default threads"
    return ratio if is_below(slow, fast, min_gain=MIN_GAIN) else 0.0, text
