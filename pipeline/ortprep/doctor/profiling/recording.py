"""`doctor profile MODEL`: runs a model with the profiler on, and shows where a run spends its time."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.codec import encode
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.children.probe import ProbeRequest, measure_plan
from ortprep.children.scratch_folder import scratch_folder
from ortprep.doctor.diagnosis import Diagnosis, Finding, diagnose
from ortprep.doctor.doctor_model import DoctorModel, guard_device, plan_of
from ortprep.doctor.profiling.operator_times import Profile, family_of, find_in_profile, summarise_profile
from ortprep.doctor.profiling.trace_events import profiled, read_events
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.tables import Table, fill_table

_MAX_ROWS = 12
_STEADY_S = 0.2
_TIMEOUT_S = 6 * 3600.0
_MIN_RUNS, _MAX_RUNS, _BUDGET_S = 4, 50, 2.0


def diagnose_profile(
    subject: DoctorModel, *, device: str = CPU_DEVICE, trace: Path | None = None
) -> Diagnosis:
    """Reports the operators and execution providers that a run of a model spends its time in.

    Args:
        subject: The model; its source where there is one, else the bundle.
        device: `cpu` or `cuda:<ordinal>`.
        trace: Where the trace is kept, None for nowhere.

    Raises:
        LoadError: The model cannot be loaded or run, or has no variant for the device.
        BundleError: The bundle cannot be read.
        ChildError: The process died.
        StageError: The folder of the device's lock cannot be trusted.
        OSError: The disk is full, or the trace cannot be written.
    """
    plan = plan_of(subject, device)
    with guard_device(device):
        profile = profile_plan(plan, subject.sample, trace=trace)
        steady = measure_plan(ProbeRequest(plan, subject.sample, _STEADY_S), timeout_s=_TIMEOUT_S).steady_ms
    findings = list(find_in_profile(profile, on_gpu=device != CPU_DEVICE, steady_ms=steady))
    if trace is not None:
        hint = "open it in https://ui.perfetto.dev or chrome://tracing"
        findings.append(Finding("trace-written", "note", f"trace of every node: {trace}", hint))
    return diagnose(
        "profile",
        findings,
        subject=subject.name,
        tables=_tables(profile, device, steady),
        figures={
            "device": device,
            **encode(profile),
            "families": profile.families(),
            "copies": profile.copies(),
            "steady_ms": steady,
        },
    )


def _tables(profile: Profile, device: str, steady_ms: float) -> tuple[Table, ...]:
    total = profile.nodes_ms or 1.0
    run = f"a run on {device}: {steady_ms:.2f} ms; {profile.run_ms:.2f} ms profiled, {total:.2f} ms in nodes"
    operators = fill_table(
        run,
        profile.operators[:_MAX_ROWS],
        (
            ("operator", lambda row: row.operator),
            ("execution provider", lambda row: row.provider),
            ("family", lambda row: family_of(row.operator)),
            ("nodes", lambda row: row.nodes),
            ("ms", lambda row: row.ms),
            ("%", lambda row: row.ms / total * 100),
        ),
    )
    shares = tuple((name, share * 100) for name, share in profile.families().items())
    families = Table("families of operators", ("family", "%"), shares)
    placement = Table("nodes by execution provider", ("provider", "nodes"), (*profile.ran.items(),))
    return (operators, families, placement)


@dataclass(frozen=True)
class ProfileRequest:
    """What is profiled: a plan of a session, its sample, and the folder that takes the trace."""

    plan: SessionPlan
    sample: Path
    folder: Path


def profile_plan(plan: SessionPlan, sample: str, *, trace: Path | None = None) -> Profile:
    """Profiles one plan in one fresh process; the caller holds the device's lock.

    Args:
        plan: How the session is made.
        sample: `.npz` file with one array per input.
        trace: Where the trace is kept, in the format of Chrome's tracing, which Perfetto opens.

    Raises:
        LoadError: The session could not be made or run.
        ChildError: The process died.
        OSError: The trace cannot be written.
    """
    with scratch_folder("ortprep-profile-") as folder:
        profile = run_child(record, ProfileRequest(plan, Path(sample), folder), timeout_s=_TIMEOUT_S).value
        if trace is not None:
            # Beside it first, so that what was there before is replaced by a whole trace or not at all.
            unfinished = trace.with_name(f".tmp-{trace.name}")
            shutil.copyfile(next(folder.glob("profile*")), unfinished)
            unfinished.replace(trace)
    return profile


def record(request: ProfileRequest) -> Profile:
    """Runs a model with the profiler on; runs in a child.

    Raises:
        LoadError: The session could not be made or run.
    """
    from ortprep.runtime.loading.binding import run_first
    from ortprep.runtime.loading.session import build_session
    from ortprep.runtime.tensors.arrays import read_tensors, run_session

    session = build_session(profiled(request.plan, request.folder / "profile"))
    feeds = read_tensors(request.sample)
    end, runs = time.monotonic() + _BUDGET_S, 0
    while runs < _MIN_RUNS or (runs < _MAX_RUNS and time.monotonic() < end):
        run_first(lambda: run_session(session, feeds), feeds, request.plan.model)
        runs += 1
    return summarise_profile(read_events(Path(session.end_profiling())))
