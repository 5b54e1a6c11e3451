"""`doctor profile MODEL`: runs a model with the profiler on, and shows where a run spends its time.

ONNX Runtime writes a Chrome trace, with an event for every run and every node.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ortprep.bundle.atomic import TEMP_PREFIX
from ortprep.bundle.codec import encode
from ortprep.bundle.file_links import copy_file
from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.bundle.session_record import SessionPlan
from ortprep.children.child import run_child
from ortprep.children.probe import ProbeRequest, measure_plan
from ortprep.doctor.diagnosis import Diagnosis, Finding, diagnose
from ortprep.doctor.doctor_model import CHILD_TIMEOUT_S, DoctorModel, guard_device, plan_of
from ortprep.errors import LoadError
from ortprep.measuring.device_lock import CPU_DEVICE
from ortprep.tables import Table, fill_table

_MAX_ROWS = 12
_MAX_FIGURES = 200
_STEADY_S = 0.2
_MIN_RUNS, _MAX_RUNS, _BUDGET_S = 4, 50, 2.0
_KERNEL, _RUN = "_kernel_time", "model_run"
_OVERHEAD = 0.3
_MANY_NODES = 20


@dataclass(frozen=True)
class TraceEvent:
    """Something that took time.

    Attributes:
        name: Name of the event or the node.
        start_us: Time since the profile began, in µs.
        us: Duration in µs.
        operator: Operator type of a node, "" for none.
        provider: Execution provider of a node, "" for none.
        thread: Number of the thread that it ran on.
    """

    name: str
    start_us: float
    us: float
    operator: str = ""
    provider: str = ""
    thread: int = 0


@dataclass(frozen=True)
class ProfileEvents:
    """Contents of a profile.

    Attributes:
        session: Loading, initialising, runs.
        nodes: Runs of nodes, each without those of its subgraphs, which have events of their own.
    """

    session: tuple[TraceEvent, ...]
    nodes: tuple[TraceEvent, ...]

    def runs(self) -> tuple[tuple[float, tuple[TraceEvent, ...]], ...]:
        """Returns the duration of every run in µs, and the events of its nodes."""
        spans = sorted((event.start_us, event.us) for event in self.session if event.name == _RUN)
        return tuple(
            (us, tuple(node for node in self.nodes if begin <= node.start_us <= begin + us))
            for begin, us in spans
        )


@dataclass(frozen=True)
class OperatorTime:
    """An operator type on an execution provider, per run.

    Attributes:
        operator: Name of the operator type.
        provider: Name of the execution provider.
        ms: Time of all its nodes, in ms: median of the runs after the first.
        nodes: Number of its nodes that ran.
    """

    operator: str
    provider: str
    ms: float
    nodes: int


@dataclass(frozen=True)
class Profile:
    """Times of the runs after the first.

    Attributes:
        runs: Number of those runs.
        run_ms: A run, median; longer than without the profiler. On a GPU, times of nodes are those of
            launching their kernels.
        operators: The slowest first.
        ran: Nodes by execution provider that ran them.
    """

    runs: int
    run_ms: float
    operators: tuple[OperatorTime, ...]
    ran: Mapping[str, int]

    @property
    def nodes_ms(self) -> float:
        """All nodes together."""
        return sum(one.ms for one in self.operators)


def diagnose_profile(
    subject: DoctorModel, *, device: str = CPU_DEVICE, trace: Path | None = None
) -> Diagnosis:
    """Reports the operators and execution providers that a run of a model spends its time in.

    Args:
        subject: The model; its source where there is one, else the bundle.
        device: `cpu` or `cuda:<ordinal>`.
        trace: File that keeps the trace; None for none.

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
        steady = measure_plan(
            ProbeRequest(plan, subject.sample, _STEADY_S), timeout_s=CHILD_TIMEOUT_S
        ).steady_ms
    findings = list(find_in_profile(profile, on_gpu=device != CPU_DEVICE, steady_ms=steady))
    if trace is not None:
        hint = "open it in https://ui.perfetto.dev or chrome://tracing"
        findings.append(Finding("trace-written", "note", f"trace of every node: {trace}", hint))
    return diagnose(
        "profile",
        findings,
        subject=subject.name,
        tables=_tables(profile, device, steady),
        figures={"device": device, **encode(profile), "steady_ms": steady},
    )


def _tables(profile: Profile, device: str, steady_ms: float) -> tuple[Table, ...]:
    """Returns the slowest operators, and the nodes by execution provider."""
    total = profile.nodes_ms or 1.0
    run = f"a run on {device}: {steady_ms:.2f} ms; {profile.run_ms:.2f} ms profiled, {total:.2f} ms in nodes"
    operators = fill_table(
        run,
        profile.operators[:_MAX_ROWS],
        (
            ("operator", lambda row: row.operator),
            ("execution provider", lambda row: row.provider),
            ("nodes", lambda row: row.nodes),
            ("ms", lambda row: row.ms),
            ("%", lambda row: row.ms / total * 100),
        ),
    )
    placement = Table("nodes by execution provider", ("provider", "nodes"), (*profile.ran.items(),))
    return (operators, placement)


def profile_plan(plan: SessionPlan, sample: str, *, trace: Path | None = None) -> Profile:
    """Profiles one plan in one fresh process; the caller holds the device's lock.

    Args:
        plan: Plan of the session.
        sample: `.npz` file with one array per input.
        trace: File that keeps the trace, in the format of Chrome's tracing, which Perfetto opens.

    Raises:
        LoadError: The session could not be made or run.
        ChildError: The process died.
        OSError: The trace cannot be written.
    """
    with scratch_folder("ortprep-profile-") as folder:
        profile = run_child(record, (plan, Path(sample), folder), timeout_s=CHILD_TIMEOUT_S).value
        if trace is not None:
            # Beside it first, so that what was there before is replaced by a whole trace or not at all.
            # Its name is random, since a link in its place would be followed.
            unfinished = trace.with_name(f"{TEMP_PREFIX}{trace.name}~{os.urandom(8).hex()}")
            try:
                copy_file(next(folder.glob("profile*")), unfinished)
                unfinished.replace(trace)
            finally:
                unfinished.unlink(missing_ok=True)
    return profile


def record(request: tuple[SessionPlan, Path, Path]) -> Profile:
    """Runs a model with the profiler on; runs in a child.

    Args:
        request: Plan of the session, its sample, and the folder for the trace.

    Raises:
        LoadError: The session could not be made or run.
    """
    from ortprep.runtime.loading.binding import run_first
    from ortprep.runtime.loading.session import build_session
    from ortprep.runtime.tensors.arrays import read_tensors, run_session

    plan, sample, folder = request
    session, feeds = build_session(profiled(plan, folder / "profile")), read_tensors(sample)
    end, runs = time.monotonic() + _BUDGET_S, 0
    while runs < _MIN_RUNS or (runs < _MAX_RUNS and time.monotonic() < end):
        run_first(lambda: run_session(session, feeds), feeds, plan.model)
        runs += 1
    return summarise_profile(read_events(Path(session.end_profiling())))


def profiled(plan: SessionPlan, prefix: Path, **attributes: int) -> SessionPlan:
    """Returns a plan whose session writes a profile to a file with that prefix.

    Args:
        plan: Plan of the session.
        prefix: First part of the file's path.
        attributes: Further attributes of the session options.
    """
    options = plan.session_options
    profiling: dict[str, int | bool | str] = {"enable_profiling": True, "profile_file_prefix": str(prefix)}
    recorded = {**options.attributes, **profiling, **attributes}
    return plan._replace(session_options=options._replace(attributes=recorded))


def parse_events(document: object) -> ProfileEvents:
    """Returns the events of a profile.

    Raises:
        LoadError: It is none.
    """
    if not isinstance(document, list):
        raise LoadError("not a profile of ONNX Runtime\n  expected an array of trace events, got none")
    events = [(row["cat"], _event(row)) for row in document if row.get("ph") == "X"]
    return ProfileEvents(
        session=tuple(event for category, event in events if category == "Session"),
        nodes=own_times([event for category, event in events if category == "Node" and event.operator]),
    )


def read_events(path: Path) -> ProfileEvents:
    """Reads a profile that ONNX Runtime wrote; names in it may be no UTF-8, or have control characters.

    Raises:
        LoadError: It is no profile.
        OSError: It cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    except ValueError as error:
        raise LoadError(f"not a profile of ONNX Runtime: {path.name}\n  {error}") from error
    return parse_events(document)


def own_times(events: Sequence[TraceEvent]) -> tuple[TraceEvent, ...]:
    """Returns events in order of their start, each with its time less that of the events within it.

    A `Loop` or `If` lasts as long as the nodes of its subgraph, which have events beside it.
    """
    ordered = sorted(events, key=lambda event: (event.start_us, -event.us))
    own = [event.us for event in ordered]
    around: dict[int, list[int]] = {}
    for index, event in enumerate(ordered):
        outer = around.setdefault(event.thread, [])
        while outer and ordered[outer[-1]].start_us + ordered[outer[-1]].us <= event.start_us:
            outer.pop()
        if outer:
            own[outer[-1]] -= event.us
        outer.append(index)
    return tuple(replace(event, us=max(us, 0.0)) for event, us in zip(ordered, own, strict=True))


def _event(row: Mapping[str, Any]) -> TraceEvent:
    """Returns an event of the trace."""
    arguments = row.get("args", {})
    name = str(row["name"])
    is_kernel_time = name.endswith(_KERNEL)
    return TraceEvent(
        name=name.removesuffix(_KERNEL),
        start_us=float(row["ts"]),
        us=float(row["dur"]),
        # ONNX Runtime also notes fences and the like of a node; its run is what counts.
        operator=str(arguments.get("op_name", "")) if is_kernel_time else "",
        provider=str(arguments.get("provider", "")),
        thread=int(row.get("tid", 0)),
    )


def summarise_profile(events: ProfileEvents) -> Profile:
    """Returns the summary of the events of several runs, the first left out.

    Raises:
        LoadError: There are fewer than two.
    """
    runs = events.runs()[1:]
    if not runs:
        raise LoadError("nothing to summarise\n  expected the profile of at least two runs, got fewer")
    by_kind: dict[tuple[str, str], list[list[TraceEvent]]] = {}
    for index, (_, nodes) in enumerate(runs):
        for node in nodes:
            kind = by_kind.setdefault((node.operator, node.provider), [[] for _ in runs])
            kind[index].append(node)
    rows = [
        OperatorTime(
            *kind,
            ms=median(sum(node.us for node in run) for run in of_runs) / 1e3,
            nodes=max(len({node.name for node in run}) for run in of_runs),
        )
        for kind, of_runs in by_kind.items()
    ]
    ran: dict[str, int] = {}
    for _, provider in {(node.name, node.provider) for node in runs[-1][1]}:
        ran[provider] = ran.get(provider, 0) + 1
    slowest = sorted(rows, key=lambda row: -row.ms)[:_MAX_FIGURES]
    return Profile(len(runs), median(us for us, _ in runs) / 1e3, tuple(slowest), ran)


def find_in_profile(profile: Profile, *, on_gpu: bool, steady_ms: float) -> Iterator[Finding]:
    """Yields what takes most of a run: one operator type, or the time between nodes.

    Args:
        profile: Summary of the runs.
        on_gpu: Whether the session is for a GPU.
        steady_ms: A run without the profiler.
    """
    if on_gpu:
        text = (
            "times of nodes are those of launching their kernels, not of running them, since ONNX Runtime "
            "does not record kernels (microsoft/onnxruntime #20398)"
        )
        hint = "nsys profile --trace=cuda,nvtx python your_job.py"
        yield Finding("times-are-of-launches", "note", text, hint)
        return
    if profile.operators:
        slowest = profile.operators[0]
        share = f"{slowest.ms / (profile.nodes_ms or 1.0):.0%} of the time of its nodes"
        yield Finding("slowest-operator", "note", f"{slowest.operator}: {slowest.ms:.2f} ms a run, {share}")
    # The profiler's own work lies between nodes too, so a run without it counts.
    between = 1 - profile.nodes_ms / steady_ms if steady_ms else 0.0
    if between >= _OVERHEAD and sum(profile.ran.values()) >= _MANY_NODES:
        text = f"at least {between:.0%} of a run ({steady_ms:.2f} ms) lies between its nodes: they are small"
        hint = "send larger batches; --shape 'INPUT=8,…' measures what that gains"
        yield Finding("time-between-nodes", "advice", text, hint)
