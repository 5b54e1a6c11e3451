"""`doctor profile MODEL`."""

from __future__ import annotations

from pathlib import Path

from ortprep.bundle.codec import encode
from ortprep.children.probe import ProbeRequest, measure_plan
from ortprep.doctor.diagnosis import Diagnosis, Finding, diagnose
from ortprep.doctor.doctor_model import DoctorModel, guard_device, plan_of
from ortprep.doctor.profiling.recording import profile_plan
from ortprep.doctor.profiling.verdict import Profile, family_of, find_in_profile
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.tables import CellValue, Table

_MAX_ROWS = 12
_STEADY_S = 0.2
_TIMEOUT_S = 6 * 3600.0


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
    operators: tuple[tuple[CellValue, ...], ...] = tuple(
        (row.operator, row.provider, family_of(row.operator), row.nodes, row.ms, row.ms / total * 100)
        for row in profile.operators[:_MAX_ROWS]
    )
    families: tuple[tuple[CellValue, ...], ...] = tuple(
        (name, x * 100) for name, x in profile.families().items()
    )
    title = (
        f"a run on {device}: {steady_ms:.2f} ms; {profile.run_ms:.2f} ms profiled, {total:.2f} ms in nodes"
    )
    tables = [
        Table(title, ("operator", "execution provider", "family", "nodes", "ms", "%"), operators),
        Table("families of operators", ("family", "%"), families),
        _placement_table(profile),
    ]
    if profile.kernels:
        rows = tuple((row.name, row.operator, row.provider, row.ms) for row in profile.kernels[:_MAX_ROWS])
        columns = ("name", "operator", "execution provider", "ms")
        tables.append(Table("slowest GPU kernels", columns, rows))
    return tuple(tables)


def _placement_table(profile: Profile) -> Table:
    providers = dict.fromkeys((*profile.assigned, *profile.ran))
    rows: tuple[tuple[CellValue, ...], ...] = tuple(
        (name, profile.assigned.get(name), profile.ran.get(name, 0)) for name in providers
    )
    columns = ("execution provider", "nodes of the model given to it", "nodes that ran on it, after fusion")
    return Table("placement", columns, rows)
