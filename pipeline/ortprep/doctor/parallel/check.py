"""The check `parallel`: N sessions one after another, in threads and in processes."""

from __future__ import annotations

from collections.abc import Sequence

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.doctor.diagnosis import Diagnosis, diagnose
from ortprep.doctor.doctor_model import DoctorModel, guard_device, plan_of
from ortprep.doctor.interleaved_runs import MAX_COMPARISON_S
from ortprep.doctor.parallel.session_creation import CreationTimes, make_sessions
from ortprep.doctor.parallel.verdict import (
    WAYS,
    CreationResult,
    ParallelRun,
    Way,
    find_in,
    tabulate,
)
from ortprep.doctor.process_group import run_together
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.measuring.rounds import run_interleaved
from ortprep.runtime.machine.hardware import read_hardware

_MAX_ON_CPU = 4
_MAX_ROUNDS = 7
_BUDGET_S = 7.0


def diagnose_parallel(
    subject: DoctorModel, *, devices: Sequence[str], sessions: int | None = None
) -> Diagnosis:
    """Makes several sessions of a model in three ways, in fresh processes, in interleaved rounds.

    Args:
        subject: The model; a source goes before its bundle.
        devices: `cpu`, `cuda:0`, …: sessions are put on them in turn.
        sessions: Number of sessions; None for one per GPU, or on the CPU one per core, from two to four.

    Returns:
        Also where a way fails: that is a finding.

    Raises:
        LoadError: Not even one session can be made, or no variant of the bundle runs on a device.
        ChildError: The process that makes one died.
        BundleError: The bundle cannot be read.
        StageError: The folder of the device's lock cannot be trusted, or this thread measures already.
        OSError: There is no room on the disk for what processes are asked and answer.
    """
    cores = read_hardware().cores
    count = count_sessions(devices, cores) if sessions is None else sessions
    plans = [plan_of(subject, devices[index % len(devices)]) for index in range(count)]
    # A measurement holds the CPU whatever its device: one device's lock keeps all others out.
    with guard_device(devices[0]):
        run = _measure(plans, devices, lanes=count_lanes(devices, cores))
    tables = [tabulate(run)] if run.ways.rounds else []
    return diagnose("parallel", find_in(run), subject=subject.name, tables=tables, figures=encode(run))


def count_sessions(devices: Sequence[str], cores: int) -> int:
    """Returns how many sessions to try: one per GPU, or on the CPU one per core; two to four there. Pure."""
    if list(devices) == [CPU_DEVICE]:
        return min(_MAX_ON_CPU, max(2, cores))
    return max(2, len(devices))


def count_lanes(devices: Sequence[str], cores: int) -> int:
    """Returns how many sessions can be made at once at best. Pure."""
    return cores if list(devices) == [CPU_DEVICE] else len(set(devices))


def _measure(plans: Sequence[SessionPlan], devices: Sequence[str], *, lanes: int) -> ParallelRun:
    # This one does not count: it brings the file into memory, says soon whether the model can be loaded at
    # all, and shows how long it would take to load it so many times.
    version, first = _make("sequential", plans[:1])
    ways = run_interleaved(
        WAYS,
        lambda way: _make(way, plans)[1],
        estimate_s=len(WAYS) * len(plans) * first.ready_ms / 1e3,
        max_rounds=_MAX_ROUNDS,
        max_comparison_s=MAX_COMPARISON_S,
        budget_s=_BUDGET_S,
    )
    return ParallelRun(
        sessions=len(plans),
        devices=tuple(devices),
        lanes=lanes,
        onnxruntime=version,
        ways=ways,
    )


def _make(way: Way, plans: Sequence[SessionPlan]) -> tuple[str, CreationResult]:
    """Makes the sessions in fresh processes; returns the version of ONNX Runtime, and the times."""
    shares = [[plan] for plan in plans] if way == "processes" else [plans]
    requests = [{"plans": share, "in_threads": way == "threads"} for share in shares]
    replies = run_together(make_sessions, requests, participants=len(shares))
    times = [decode(CreationTimes, value) for value in replies.values]
    return times[0].onnxruntime, combine_times(replies.started_s, times)


def combine_times(started_s: float, times: Sequence[CreationTimes]) -> CreationResult:
    """Returns the times of all processes together. Pure."""
    begun_s = [begun_s for each in times for begun_s in each.begun_s]
    ready_s = [ready_s for each in times for ready_s in each.ready_s]
    return CreationResult(
        ready_ms=(max(ready_s) - started_s) * 1e3,
        start_ms=(max(each.imported_s for each in times) - started_s) * 1e3,
        creating_ms=(max(ready_s) - min(begun_s)) * 1e3,
        session_ms=tuple((ready - begun) * 1e3 for begun, ready in zip(begun_s, ready_s, strict=True)),
        private_mb=sum(each.private_mb for each in times),
    )
