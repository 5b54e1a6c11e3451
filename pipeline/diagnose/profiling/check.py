"""`doctor profile MODEL`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.bundle.codec import encode
from pipeline.diagnose.diagnosis import Cell, Diagnosis, Finding, Table, diagnose
from pipeline.diagnose.profiling.profile import NodeTime, Profile, family_of, find_in_profile
from pipeline.diagnose.profiling.recording import profile_plan
from pipeline.diagnose.subject import Subject, plan_of
from pipeline.measuring.device_lock import CPU_DEVICE, measuring

_SHOWN = 12


def diagnose_profile(subject: Subject, *, device: str = CPU_DEVICE, trace: Path | None = None) -> Diagnosis:
    """Says which operators, on which execution provider, a run of a model spends its time in.

    Args:
        subject: The model; its source where there is one, else the bundle.
        device: `cpu` or `cuda:<ordinal>`.
        trace: Where the trace is kept, None for nowhere.

    Raises:
        LoadError: The model cannot be loaded or run, or has no variant for the device.
        BundleError: The bundle cannot be read.
        ChildError: The process died.
        OSError: The trace cannot be written.
    """
    with measuring(device):
        profile = profile_plan(plan_of(subject, device), subject.sample, trace=trace)
    findings = list(find_in_profile(profile, on_gpu=device != CPU_DEVICE))
    if trace is not None:
        hint = "open it in https://ui.perfetto.dev or chrome://tracing"
        findings.append(Finding("trace-written", "note", f"trace of every node: {trace}", hint))
    return diagnose(
        "profile",
        findings,
        subject=subject.name,
        tables=_tables(profile, device),
        figures={"device": device, **encode(profile), "families": profile.families()},
    )


def _tables(profile: Profile, device: str) -> tuple[Table, ...]:
    total = profile.nodes_ms or 1.0
    operators: tuple[tuple[Cell, ...], ...] = tuple(
        (row.operator, row.provider, family_of(row.operator), row.nodes, row.ms, row.ms / total * 100)
        for row in profile.operators[:_SHOWN]
    )
    families: tuple[tuple[Cell, ...], ...] = tuple((name, x * 100) for name, x in profile.families().items())
    title = f"a run on {device}: {profile.run_ms:.2f} ms profiled, {profile.nodes_ms:.2f} ms of it in nodes"
    tables = [
        Table(title, ("operator", "execution provider", "family", "nodes", "ms", "%"), operators),
        Table("families of operators", ("family", "%"), families),
        _nodes_table("slowest nodes", profile.nodes),
    ]
    if profile.kernels:
        tables.append(_nodes_table("slowest GPU kernels", profile.kernels))
    return tuple(tables)


def _nodes_table(title: str, nodes: Sequence[NodeTime]) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (row.name, row.operator, row.provider, row.ms) for row in nodes[:_SHOWN]
    )
    return Table(title, ("name", "operator", "execution provider", "ms"), rows)
