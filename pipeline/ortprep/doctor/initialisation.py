"""`doctor init MODEL`: takes a start apart, and says which measure would remove which part of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.onnx_wire import WireError, external_locations, read_skeleton
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.bytecode import Bytecode
from ortprep.children.probe import ProbeRequest, ProbeResult, measure_plan
from ortprep.doctor.diagnosis import Diagnosis, Finding, diagnose
from ortprep.doctor.doctor_model import (
    CHILD_TIMEOUT_S,
    DEFAULT,
    PREPARE,
    PREPARED,
    DoctorModel,
    guard_device,
    plan_of,
)
from ortprep.doctor.initialisation_phases import TITLES, PhaseName, Trace, trace_plan
from ortprep.measuring.comparison import order_of_round
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.tables import Table

ROUNDS = 5

WORTH_TELLING = 0.1
"""Share of the time to the first result from which on a phase is a finding."""

ACCOUNTED = 0.1
"""Largest relative difference between the sum of the phases and an initialisation without logging."""

_STEADY_S = 0.2


@dataclass(frozen=True)
class Start:
    """Parts of the time to a job's first result, in ms.

    Attributes:
        numpy_ms: Time to import numpy.
        onnxruntime_ms: Time to import ONNX Runtime.
        phases: Time of each phase of making the session.
        first_extra_ms: Extra time of the first run over later ones.
        steady_ms: Time of a later run.
        measured_init_ms: Time to make the session, in processes without logging.
        is_prepared: Whether it is of a bundle.
        weights_outside: Whether the weights are in a file of their own.
        bytecode: What of the imports was compiled.
    """

    numpy_ms: float
    onnxruntime_ms: float
    phases: Mapping[PhaseName, float]
    first_extra_ms: float
    steady_ms: float
    measured_init_ms: float
    is_prepared: bool = False
    weights_outside: bool = False
    bytecode: Bytecode = field(default_factory=Bytecode)

    @property
    def imports_ms(self) -> float:
        """Both imports."""
        return self.numpy_ms + self.onnxruntime_ms

    @property
    def init_ms(self) -> float:
        """Making the session: all phases together."""
        return sum(self.phases.values())

    @property
    def total_ms(self) -> float:
        """From the first import to the first result."""
        return self.imports_ms + self.init_ms + self.first_extra_ms + self.steady_ms


def find_in_start(start: Start) -> tuple[Finding, ...]:
    """Returns what a start shows, and which measure would remove which part of it. Pure."""
    return (*_accounts(start), *_imports(start), *_savings(start), *_first_run(start))


def _accounts(start: Start) -> Iterator[Finding]:
    """Yields whether the phases add up to the time of processes without logging."""
    traced_ms, measured_ms = start.init_ms, start.measured_init_ms
    share = traced_ms / measured_ms if measured_ms else 1.0
    text = (
        f"the phases add up to {traced_ms:.0f} ms, {share:.0%} of the {measured_ms:.0f} ms "
        "that processes without logging took"
    )
    if abs(share - 1) <= ACCOUNTED:
        yield Finding("phases-add-up", "ok", text)
    else:
        hint = "run it again while the machine is idle, or with more --rounds"
        yield Finding("phases-do-not-add-up", "note", text, hint)


def _imports(start: Start) -> Iterator[Finding]:
    """Yields that imports compile files at every start."""
    if (problem := start.bytecode.problem) is not None:
        text = f"{problem}, within the {start.imports_ms:.0f} ms of its imports"
        yield Finding("no-bytecode", "advice", text, start.bytecode.remedy)


def _savings(start: Start) -> Iterator[Finding]:
    """Yields which phases take long, where most of that can be saved, and how."""
    once = "optimising the graph once, before deployment, and loading it with optimisation off"
    outside = "keeping the weights in a file of their own, which is mapped instead of parsed and copied"
    is_source, is_inside = not start.is_prepared, not start.is_prepared and not start.weights_outside
    for applies, code, phases, does in (
        (is_source, "optimised-at-every-load", ("inline", "optimise"), once),
        (is_inside, "weights-inside-the-model-file", ("parse", "weights_out"), outside),
    ):
        took = {name: start.phases[name] for name in phases if name in start.phases}
        ms = sum(took.values())
        if applies and ms >= WORTH_TELLING * start.total_ms:
            what = " and ".join(TITLES[name] for name in took)
            share = f"{ms:.0f} ms of {start.total_ms:.0f} ms to the first result"
            text = f"{what}: {share}; most of that is saved by {does}"
            yield Finding(code, "advice", text, PREPARE)


def _first_run(start: Start) -> Iterator[Finding]:
    """Yields that the first run takes long."""
    ms = start.first_extra_ms
    if ms < WORTH_TELLING * start.total_ms:
        return
    text = f"the first run takes {ms:.0f} ms longer than later ones ({start.steady_ms:.1f} ms)"
    hint = "answer requests only after a warm-up run: load(bundle, check='golden')   (docs/loading.md)"
    yield Finding("first-run-takes-long", "advice", text, hint)


def diagnose_initialisation(
    subject: DoctorModel, *, device: str = CPU_DEVICE, rounds: int = ROUNDS
) -> Diagnosis:
    """Takes the start of a model apart: imports, every phase of making its session, first run.

    Processes with and without logging take turns; one process goes before them and does not count. The
    process that took the median time is shown, so that its phases add up.

    Args:
        subject: The model.
        device: `cpu` or `cuda:<ordinal>`.
        rounds: Fresh processes of each kind.

    Raises:
        LoadError: The model cannot be loaded or run, or the bundle has no variant for the device.
        BundleError: The bundle cannot be read.
        ChildError: A process died.
        CacheError: The folder of the device's lock cannot be trusted.
        OSError: There is no room for the log.
    """
    name, plan = PREPARED if subject.is_bundle else DEFAULT, plan_of(subject, device)
    with guard_device(device):
        plain, traced = _measure(plan, subject.sample, rounds)
    start = _build_start(plan, plain, traced, name)
    return diagnose(
        "init",
        find_in_start(start),
        subject=subject.name,
        tables=[_phases_table(name, start)],
        figures={"device": device, name: _figures(start, plain, traced)},
    )


def _measure(plan: SessionPlan, sample: str, rounds: int) -> tuple[list[ProbeResult], list[Trace]]:
    """Returns the results of interleaved processes: without logging, and with it."""
    plain: list[ProbeResult] = []
    traced: list[Trace] = []
    _probe(plan, sample)  # brings the files into the page cache
    for index in range(rounds):
        for is_traced in order_of_round((False, True), index):
            if is_traced:
                traced.append(trace_plan(plan))
            else:
                plain.append(_probe(plan, sample))
    return plain, traced


def _probe(plan: SessionPlan, sample: str) -> ProbeResult:
    return measure_plan(ProbeRequest(plan, sample, _STEADY_S), timeout_s=CHILD_TIMEOUT_S)


def _build_start(
    plan: SessionPlan, plain: Sequence[ProbeResult], traced: Sequence[Trace], name: str
) -> Start:
    """Returns the start that the processes of one plan show."""
    steady_ms = median(result.steady_ms for result in plain)
    try:
        weights_outside = bool(external_locations(read_skeleton(Path(plan.model))))
    except WireError:
        weights_outside = False  # ONNX Runtime's own format, which is no protobuf
    return Start(
        numpy_ms=median(trace.numpy_ms for trace in traced),
        onnxruntime_ms=median(trace.onnxruntime_ms for trace in traced),
        phases=_middle(traced).phases,
        first_extra_ms=max(median(result.first_ms for result in plain) - steady_ms, 0.0),
        steady_ms=steady_ms,
        measured_init_ms=median(result.init_ms for result in plain),
        is_prepared=name == PREPARED,
        weights_outside=weights_outside,
        bytecode=_middle(traced).bytecode,
    )


def _middle(traces: Sequence[Trace]) -> Trace:
    ordered = sorted(traces, key=lambda trace: trace.init_ms)
    return ordered[(len(ordered) - 1) // 2]


def _phases_table(name: str, start: Start) -> Table:
    """Returns the parts of a start, in their order."""
    rows: list[tuple[str, float]] = [
        ("import numpy", start.numpy_ms),
        ("import ONNX Runtime", start.onnxruntime_ms),
        *((TITLES[name], ms) for name, ms in start.phases.items()),
        ("first run: what later ones do not take", start.first_extra_ms),
        ("first run: what every run takes", start.steady_ms),
    ]
    cells = tuple((title, ms, ms / start.total_ms * 100) for title, ms in rows)
    return Table(f"{name}: {start.total_ms:.0f} ms to the first result", ("phase", "ms", "%"), cells)


def _figures(start: Start, plain: Sequence[ProbeResult], traced: Sequence[Trace]) -> dict[str, Any]:
    """Returns a start and the figures of its processes, as JSON types."""
    return {
        **encode(start),
        "init_ms": start.init_ms,
        "total_ms": start.total_ms,
        "onnxruntime": traced[0].onnxruntime,
        "processes": {
            "plain": encode(tuple(plain)),
            "traced_init_ms": [trace.init_ms for trace in traced],
        },
    }
