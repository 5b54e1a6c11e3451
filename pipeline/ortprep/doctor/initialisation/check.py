"""`doctor init MODEL`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.onnx_wire import WireError, external_locations, read_skeleton
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.probe import ProbeRequest, ProbeResult, measure_plan
from ortprep.doctor.diagnosis import Diagnosis, diagnose
from ortprep.doctor.doctor_model import (
    DEFAULT,
    PREPARED,
    DoctorModel,
    guard_device,
    plan_of_bundle,
    plan_on,
)
from ortprep.doctor.initialisation.phases import TITLES, split_prepacking
from ortprep.doctor.initialisation.tracing import Trace, trace_plan
from ortprep.doctor.initialisation.verdict import Start, find_in_start, saved_by
from ortprep.measuring.comparison import is_below
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.measuring.rounds import order_of_round
from ortprep.tables import CellValue, Table

ROUNDS = 5
_STEADY_S = 0.2
_TIMEOUT_S = 6 * 3600.0
_MAX_TRANSFORMERS = 12
_PREPACKING = "session.disable_prepacking"
_MIN_DIFFERENCE = 0.05


@dataclass
class _Measured:
    """Results of one plan, one a round: without logging, with it, and with it but without prepacking."""

    plain: list[ProbeResult] = field(default_factory=list)
    traced: list[Trace] = field(default_factory=list)
    unpacked: list[Trace] = field(default_factory=list)


def diagnose_initialisation(
    subject: DoctorModel, *, device: str = CPU_DEVICE, rounds: int = ROUNDS
) -> Diagnosis:
    """Takes the start of a model apart: imports, every phase of making its session, first run.

    Processes with and without logging, and without prepacking, take turns, of the source and of the bundle;
    one of each kind goes before them and does not count. The process that took the median time is the one
    that is shown, so that its phases add up.

    Args:
        subject: The model; where there is a bundle of it, that is taken apart beside it.
        device: `cpu` or `cuda:<ordinal>`.
        rounds: Fresh processes of each kind.

    Raises:
        LoadError: The model cannot be loaded or run, or the bundle has no variant for the device.
        BundleError: The bundle cannot be read.
        ChildError: A process died.
        StageError: The folder of the device's lock cannot be trusted.
        OSError: There is no room for the log.
    """
    plans = _plans(subject, device)
    with guard_device(device):
        measured = _measure(plans, subject.sample, rounds)
    starts = {name: _build_start(plans[name], measured[name], name, device) for name in plans}
    first = next(iter(starts))
    details = _transformers(_middle(measured[first].traced))
    return diagnose(
        "init",
        find_in_start(starts[first]),
        subject=subject.name,
        tables=[*map(_phases_table, starts, starts.values()), *details],
        figures={"device": device, **{name: _figures(starts[name], measured[name]) for name in starts}},
    )


def _plans(subject: DoctorModel, device: str) -> dict[str, SessionPlan]:
    plans = {}
    if subject.source is not None:
        plans[DEFAULT] = plan_on(subject.source, device)
    if subject.bundle is not None:
        plans[PREPARED] = plan_of_bundle(Path(subject.bundle), device)
    return plans


def _measure(plans: Mapping[str, SessionPlan], sample: str, rounds: int) -> dict[str, _Measured]:
    measured = {name: _Measured() for name in plans}
    steps = [step for name, plan in plans.items() for step in _steps(plan, sample, measured[name])]
    for plan in plans.values():
        _probe(plan, sample)  # brings the files into the page cache
    for index in range(rounds):
        for step in order_of_round(steps, index):
            step()
    return measured


def _steps(plan: SessionPlan, sample: str, into: _Measured) -> list[Callable[[], None]]:
    steps: list[Callable[[], None]] = [
        lambda: into.plain.append(_probe(plan, sample)),
        lambda: into.traced.append(trace_plan(plan)),
    ]
    if plan.session_options.config_entries.get(_PREPACKING) != "1":
        steps.append(lambda: into.unpacked.append(trace_plan(_unpacked(plan))))
    return steps


def _probe(plan: SessionPlan, sample: str) -> ProbeResult:
    return measure_plan(ProbeRequest(plan, sample, _STEADY_S), timeout_s=_TIMEOUT_S)


def _unpacked(plan: SessionPlan) -> SessionPlan:
    entries = {**plan.session_options.config_entries, _PREPACKING: "1"}
    return plan._replace(session_options=plan.session_options._replace(config_entries=entries))


def _build_start(plan: SessionPlan, measured: _Measured, name: str, device: str) -> Start:
    traced, plain = measured.traced, measured.plain
    steady_ms = median(result.steady_ms for result in plain)
    return Start(
        numpy_ms=median(trace.numpy_ms for trace in traced),
        onnxruntime_ms=median(trace.onnxruntime_ms for trace in traced),
        initialisation=split_prepacking(_middle(traced).initialisation, _prepacking_ms(measured)),
        first_extra_ms=max(median(result.first_ms for result in plain) - steady_ms, 0.0),
        steady_ms=steady_ms,
        measured_init_ms=median(result.init_ms for result in plain),
        on_gpu=device != CPU_DEVICE,
        is_prepared=name == PREPARED,
        weights_outside=_has_weights_outside(Path(plan.model)),
        is_apart=_is_apart([one.init_ms for one in traced], [one.init_ms for one in plain]),
    )


def _prepacking_ms(measured: _Measured) -> float:
    """Returns how much less making kernels takes without prepacking, 0 if not beyond the noise."""
    whole = [trace.initialisation.ms("kernels") for trace in measured.traced]
    without = [trace.initialisation.ms("kernels") for trace in measured.unpacked]
    if not without or (len(whole) > 2 and not is_below(without, whole, min_gain=_MIN_DIFFERENCE)):
        return 0.0
    return median(with_it - without_it for with_it, without_it in zip(whole, without, strict=True))


def _is_apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return is_below(one, other, min_gain=_MIN_DIFFERENCE) or is_below(other, one, min_gain=_MIN_DIFFERENCE)


def _has_weights_outside(model: Path) -> bool:
    try:
        return bool(external_locations(read_skeleton(model)))
    except WireError:
        return False  # ONNX Runtime's own format, which is no protobuf


def _middle(traces: Sequence[Trace]) -> Trace:
    ordered = sorted(traces, key=lambda trace: trace.init_ms)
    return ordered[(len(ordered) - 1) // 2]


def _phases_table(name: str, start: Start) -> Table:
    rows: list[tuple[str, float]] = [
        ("import numpy", start.numpy_ms),
        ("import ONNX Runtime", start.onnxruntime_ms),
        *((TITLES[phase.name], phase.ms) for phase in start.initialisation.phases),
        ("first run: what later ones do not take", start.first_extra_ms),
        ("first run: what every run takes", start.steady_ms),
    ]
    cells: list[tuple[CellValue, ...]] = [(title, ms, ms / start.total_ms * 100) for title, ms in rows]
    title = f"{name}: {start.total_ms:.0f} ms to the first result"
    return Table(title, ("phase", "ms", "%"), tuple(cells), bars="ms")


def _transformers(trace: Trace) -> Iterator[Table]:
    rows = trace.initialisation.transformers
    cells: list[tuple[CellValue, ...]] = [
        (row.name, row.ms, row.passes, "yes" if row.modified else "no") for row in rows[:_MAX_TRANSFORMERS]
    ]
    rest = rows[_MAX_TRANSFORMERS:]
    if rest:
        ms, passes = sum(row.ms for row in rest), sum(row.passes for row in rest)
        cells.append((f"{len(rest)} others", ms, passes, ""))
    if cells:
        columns = ("transformer", "ms", "passes", "changed the graph")
        yield Table("graph transformers", columns, tuple(cells))


def _figures(start: Start, measured: _Measured) -> dict[str, Any]:
    return {
        **encode(start),
        "init_ms": start.initialisation.total_ms,
        "total_ms": start.total_ms,
        "saved_by_ms": saved_by(start),
        "onnxruntime": measured.traced[0].onnxruntime,
        "processes": {
            "plain": encode(tuple(measured.plain)),
            "traced_init_ms": [trace.init_ms for trace in measured.traced],
            "unpacked_init_ms": [trace.init_ms for trace in measured.unpacked],
        },
    }
