"""Summary of a profile: operators, execution providers, copies. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ortprep.doctor.diagnosis import Finding
from ortprep.doctor.profiling.trace_events import ProfileEvents, TraceEvent
from ortprep.errors import LoadError
from ortprep.runtime.loading.session import CPU

_MAX_ROWS = 200
_COPIES = frozenset({"MemcpyFromHost", "MemcpyToHost"})
_SHAPES = frozenset(
    (
        *("Shape", "Size", "Gather", "Slice", "Concat", "Unsqueeze", "Squeeze", "Reshape", "Cast"),
        *("Add", "Sub", "Mul", "Div", "Mod", "Equal", "Less", "Greater", "Where", "Range", "Expand"),
        *("ReduceProd", "ReduceMax", "ReduceMin", "Floor", "Ceil", "Min", "Max", "Not", "And", "Or"),
        *("ConstantOfShape", "Identity"),
    )
)
"""Operators that arithmetic on shapes consists of."""

_FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("convolution", ("conv",)),
    ("attention", ("attention",)),
    ("matrix product", ("matmul", "gemm", "einsum")),
    ("recurrence", ("lstm", "gru", "rnn")),
    ("normalisation", ("norm", "lrn")),
    ("copies between devices", ("memcpy",)),
    ("layout", ("reorder", "transpose", "reshape", "concat", "split", "slice", "gather", "cast")),
)
"""Families of operators by parts of their names; the first that fits counts."""

_OTHER = "other"
_DOMINANT = 0.5
_OVERHEAD = 0.3
_MANY_NODES = 20


@dataclass(frozen=True)
class OperatorTime:
    """An operator type on an execution provider, per run.

    Attributes:
        operator: Operator type.
        provider: Execution provider.
        ms: All its nodes together, median of the runs after the first.
        nodes: How many of them ran, each once however often it did.
    """

    operator: str
    provider: str
    ms: float
    nodes: int


@dataclass(frozen=True)
class KernelTime:
    """A GPU kernel."""

    name: str
    operator: str
    provider: str
    ms: float


@dataclass(frozen=True)
class Profile:
    """Where a run spends its time; the first run is left out.

    Attributes:
        runs: How many were looked at.
        run_ms: A run, median; longer than without the profiler. On a GPU whose kernels are not recorded,
            times of nodes are those of launching them.
        operators: The slowest first.
        kernels: GPU kernels, mean by name and run, where this build of ONNX Runtime records them.
        ran: Nodes by execution provider that ran them.
        assigned: Nodes of the model by the provider they were given to; empty before ONNX Runtime 1.25.
    """

    runs: int
    run_ms: float
    operators: tuple[OperatorTime, ...]
    kernels: tuple[KernelTime, ...]
    ran: Mapping[str, int]
    assigned: Mapping[str, int] = field(default_factory=dict)

    @property
    def nodes_ms(self) -> float:
        """All nodes together."""
        return sum(one.ms for one in self.operators)

    def copies(self) -> int:
        """Returns how many copies between devices a run makes."""
        return sum(one.nodes for one in self.operators if one.operator in _COPIES)

    def families(self) -> dict[str, float]:
        """Returns the share of the nodes' time by family of operators, the largest first."""
        shares: dict[str, float] = {}
        for row in self.operators:
            name = family_of(row.operator)
            shares[name] = shares.get(name, 0.0) + row.ms / (self.nodes_ms or 1.0)
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def family_of(operator: str) -> str:
    """Returns the family of an operator type."""
    lower = operator.lower()
    return next((name for name, parts in _FAMILIES if any(part in lower for part in parts)), _OTHER)


def summarise_profile(events: ProfileEvents, *, assigned: Mapping[str, int]) -> Profile:
    """Returns the summary of the events of several runs.

    Args:
        events: Of at least two runs; the first is left out.
        assigned: As `Profile` has it.

    Raises:
        LoadError: There are fewer.
    """
    runs = events.runs()[1:]
    if not runs:
        raise LoadError("nothing to summarise\n  expected the profile of at least two runs, got fewer")
    spans = sorted((e.start_us, e.us) for e in events.session if e.name == "model_run")[1:]
    ran: dict[str, int] = {}
    for _, provider in {(node.name, node.provider) for node in runs[-1]}:
        ran[provider] = ran.get(provider, 0) + 1
    return Profile(
        runs=len(runs),
        run_ms=median(us for _, us in spans) / 1e3,
        operators=_operators(runs),
        kernels=_kernels(events.kernels, after_us=spans[0][0], runs=len(runs)),
        ran=ran,
        assigned=dict(assigned),
    )


def _operators(runs: Sequence[Sequence[TraceEvent]]) -> tuple[OperatorTime, ...]:
    rows = []
    for kind in dict.fromkeys(_kind(node) for run in runs for node in run):
        of_runs = [[node for node in run if _kind(node) == kind] for run in runs]
        nodes = max(len({node.name for node in run}) for run in of_runs)
        ms = median(sum(node.us for node in run) for run in of_runs) / 1e3
        rows.append(OperatorTime(*kind, ms, nodes))
    return tuple(sorted(rows, key=lambda row: -row.ms)[:_MAX_ROWS])


def _kind(node: TraceEvent) -> tuple[str, str]:
    return node.operator, node.provider


def _kernels(events: Sequence[TraceEvent], *, after_us: float, runs: int) -> tuple[KernelTime, ...]:
    times: dict[tuple[str, str, str], float] = {}
    for event in events:
        if event.start_us >= after_us:
            key = (event.name, event.operator, event.provider)
            times[key] = times.get(key, 0.0) + event.us
    rows = [KernelTime(*key, us / runs / 1e3) for key, us in times.items()]
    return tuple(sorted(rows, key=lambda row: -row.ms)[:_MAX_ROWS])


def find_in_profile(profile: Profile, *, on_gpu: bool, steady_ms: float) -> tuple[Finding, ...]:
    """Returns what a profile shows."""
    if not on_gpu:
        return (*_family(profile), *_overhead(profile, steady_ms))
    findings = _family(profile) if profile.kernels else _launches()
    return (*findings, *_placement(profile))


def _launches() -> Iterator[Finding]:
    text = (
        "times of nodes are those of launching their kernels, not of running them, since this build of ONNX "
        "Runtime does not record kernels (microsoft/onnxruntime #20398)"
    )
    yield Finding("times-are-of-launches", "note", text, "nsys profile --trace=cuda,nvtx python your_job.py")


def _family(profile: Profile) -> Iterator[Finding]:
    name, share = next(iter(profile.families().items()), (_OTHER, 0.0))
    slowest = profile.operators[0] if profile.operators else None
    if share >= _DOMINANT and name != _OTHER:
        yield Finding("one-family-dominates", "note", f"{name}: {share:.0%} of the time of a run's nodes")
    elif slowest is not None:
        text = f"no family of operators dominates; slowest: {slowest.operator}, {slowest.ms:.2f} ms a run"
        yield Finding("no-family-dominates", "note", text)


def _overhead(profile: Profile, steady_ms: float) -> Iterator[Finding]:
    """Yields what is between nodes, by a run without the profiler, which itself works between them."""
    between = 1 - profile.nodes_ms / steady_ms if steady_ms else 0.0
    if between >= _OVERHEAD and sum(profile.ran.values()) >= _MANY_NODES:
        text = f"at least {between:.0%} of a run ({steady_ms:.2f} ms) lies between its nodes: they are small"
        hint = "send larger batches; --shape 'INPUT=8,…' measures what that gains"
        yield Finding("time-between-nodes", "advice", text, hint)


def _placement(profile: Profile) -> Iterator[Finding]:
    total, fallen, copies = sum(profile.ran.values()), profile.ran.get(CPU, 0), profile.copies()
    on_cpu = [row for row in profile.operators if row.provider == CPU]
    if fallen:
        kinds = tuple(dict.fromkeys(row.operator for row in on_cpu))
        ms = sum(row.ms for row in on_cpu)
        text = f"{fallen} of {total} nodes run on the CPU, {ms:.2f} ms a run: {', '.join(kinds)[:300]}"
        yield _fallen(text, only_shapes=_SHAPES.issuperset(kinds), copies=copies)
    if copies:
        text = f"{copies} copies between devices in every run"
        hint = "keep neighbouring nodes on one device; tune: {allow: [io_binding]} spares copies of inputs"
        yield Finding("copies-between-devices", "advice", text, hint)
    if not fallen and not copies:
        text = f"all {total} nodes run on the device, without copies between"
        yield Finding("all-on-the-device", "ok", text)


def _fallen(text: str, *, only_shapes: bool, copies: int) -> Finding:
    if only_shapes and not copies:
        # ONNX Runtime moves arithmetic on shapes there itself, since copying them would take longer.
        return Finding("shapes-on-the-cpu", "note", f"{text}; arithmetic on shapes, which belongs on the CPU")
    hint = "export with another opset or element type, if the provider has no kernel for these"
    return Finding("nodes-on-the-cpu", "advice", text, hint)
