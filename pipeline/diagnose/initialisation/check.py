"""`doctor init MODEL`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.bundle.codec import encode
from pipeline.diagnose.diagnosis import Cell, Diagnosis, Finding, Table, diagnose
from pipeline.diagnose.initialisation.advice import Start, find_in_start, saved_by
from pipeline.diagnose.initialisation.phases import TITLES, split_prepacking
from pipeline.diagnose.initialisation.tracing import Trace, trace_plan
from pipeline.diagnose.subject import Subject, plan_of_bundle, plan_on
from pipeline.measuring.device_lock import CPU_DEVICE, measuring
from pipeline.measuring.rounds import order_of_round
from pipeline.runtime.probe import ProbeRequest, ProbeResult, measure_plan
from pipeline.runtime.session import SessionPlan

ROUNDS = 3
_STEADY_S = 0.3
_TIMEOUT_S = 3600.0
_MOST_TRANSFORMERS = 12
_NO_PREPACKING = {"session.disable_prepacking": "1"}


def diagnose_initialisation(subject: Subject, *, device: str = CPU_DEVICE, rounds: int = ROUNDS) -> Diagnosis:
    """Takes the start of a model apart: imports, every phase of making its session, first run.

    Processes with and without logging, and without prepacking, take turns; the process that took the median
    time is the one that is shown, so that its phases add up.

    Args:
        subject: The model; where there is a bundle of it, that is taken apart beside it.
        device: `cpu` or `cuda:<ordinal>`.
        rounds: Fresh processes of each kind.

    Raises:
        LoadError: The model cannot be loaded or run.
        ChildError: A process died.
    """
    starts: dict[str, Start] = {}
    traces: dict[str, Trace] = {}
    with measuring(device):
        for name, plan in _plans(subject, device).items():
            starts[name], traces[name] = _measure_start(plan, subject.sample, rounds, device)
    first = next(iter(starts))
    findings = [*find_in_start(starts[first]), *_compare(starts)]
    return diagnose(
        "init",
        findings,
        subject=subject.name,
        tables=[*map(_phases_table, starts, starts.values()), _transformers(traces[first])],
        figures={"device": device, **{name: _figures(starts[name], traces[name]) for name in starts}},
    )


def _plans(subject: Subject, device: str) -> dict[str, SessionPlan]:
    plans = {}
    if subject.source is not None:
        plans["default"] = plan_on(subject.source, device)
    if subject.bundle is not None:
        plans["prepared"] = plan_of_bundle(Path(subject.bundle), device)
    return plans


def _measure_start(plan: SessionPlan, sample: str, rounds: int, device: str) -> tuple[Start, Trace]:
    plain: list[ProbeResult] = []
    traced: list[Trace] = []
    without: list[Trace] = []
    steps: tuple[Callable[[], None], ...] = (
        lambda: plain.append(_probe(plan, sample)),
        lambda: traced.append(trace_plan(plan, sample)),
        lambda: without.append(trace_plan(_unpacked(plan), sample)),
    )
    for index in range(rounds):
        for step in order_of_round(steps, index):
            step()
    shown = _middle(traced)
    initialisation = split_prepacking(shown.initialisation, _middle(without).initialisation)
    steady_ms = median(result.steady_ms for result in plain)
    start = Start(
        numpy_ms=median(trace.numpy_ms for trace in traced),
        onnxruntime_ms=median(trace.onnxruntime_ms for trace in traced),
        initialisation=initialisation,
        first_extra_ms=max(median(result.first_ms for result in plain) - steady_ms, 0.0),
        steady_ms=steady_ms,
        measured_init_ms=median(result.init_ms for result in plain),
        on_gpu=device != CPU_DEVICE,
    )
    return start, shown


def _probe(plan: SessionPlan, sample: str) -> ProbeResult:
    return measure_plan(ProbeRequest(plan, sample, _STEADY_S), timeout_s=_TIMEOUT_S)


def _unpacked(plan: SessionPlan) -> SessionPlan:
    entries = {**plan.session_options.config_entries, **_NO_PREPACKING}
    return replace(plan, session_options=replace(plan.session_options, config_entries=entries))


def _middle(traces: list[Trace]) -> Trace:
    ordered = sorted(traces, key=lambda trace: trace.init_ms)
    return ordered[(len(ordered) - 1) // 2]


def _compare(starts: Mapping[str, Start]) -> tuple[Finding, ...]:
    if "prepared" not in starts or "default" not in starts:
        return ()
    default, prepared = starts["default"].total_ms, starts["prepared"].total_ms
    text = f"prepared, the first result is there after {prepared:.0f} ms instead of {default:.0f} ms"
    return (Finding("prepared-start", "good" if prepared < default else "note", text),)


def _phases_table(name: str, start: Start) -> Table:
    rows: list[tuple[str, float]] = [
        ("import numpy", start.numpy_ms),
        ("import ONNX Runtime", start.onnxruntime_ms),
        *((TITLES[phase.name], phase.ms) for phase in start.initialisation.phases),
        ("first run: what later ones do not take", start.first_extra_ms),
        ("first run: what every run takes", start.steady_ms),
    ]
    cells: list[tuple[Cell, ...]] = [(title, ms, ms / start.total_ms * 100) for title, ms in rows]
    title = f"{name}: {start.total_ms:.0f} ms to the first result"
    return Table(title, ("phase", "ms", "%"), tuple(cells), bars="ms")


def _transformers(trace: Trace) -> Table:
    rows = trace.initialisation.transformers
    shown: list[tuple[Cell, ...]] = [
        (row.name, row.ms, row.passes, "yes" if row.modified else "no") for row in rows[:_MOST_TRANSFORMERS]
    ]
    rest = rows[_MOST_TRANSFORMERS:]
    if rest:
        shown.append(
            (f"{len(rest)} others", sum(row.ms for row in rest), sum(row.passes for row in rest), "")
        )
    return Table("graph transformers", ("transformer", "ms", "passes", "changed the graph"), tuple(shown))


def _figures(start: Start, trace: Trace) -> dict[str, Any]:
    return {
        **encode(start),
        "init_ms": start.initialisation.total_ms,
        "total_ms": start.total_ms,
        "first_run_operators_ms": dict(trace.first_operators),
        "saved_by_ms": saved_by(start),
        "onnxruntime": trace.onnxruntime,
    }
