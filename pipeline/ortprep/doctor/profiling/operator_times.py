"""Summary of a profile: operators, execution providers, copies; and what it shows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
class Profile:
    """Where a run spends its time; the first run is left out.

    Attributes:
        runs: How many were looked at.
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
    slowest = sorted(rows, key=lambda row: -row.ms)[:_MAX_ROWS]
    return Profile(len(runs), median(us for us, _ in runs) / 1e3, tuple(slowest), ran)


def find_in_profile(profile: Profile, *, on_gpu: bool, steady_ms: float) -> tuple[Finding, ...]:
    """Returns what a profile shows.

    Args:
        profile: Summary of the runs.
        on_gpu: Whether the session is for a GPU.
        steady_ms: A run without the profiler.
    """
    if on_gpu:
        return tuple(_placement(profile))
    return (*_family(profile), *_overhead(profile, steady_ms))


def _family(profile: Profile) -> Iterator[Finding]:
    name, share = next(iter(profile.families().items()), (_OTHER, 0.0))
    if share >= _DOMINANT and name != _OTHER:
        yield Finding("one-family-dominates", "note", f"{name}: {share:.0%} of the time of a run's nodes")
    elif profile.operators:
        slowest = profile.operators[0]
        text = f"no family of operators dominates; slowest: {slowest.operator}, {slowest.ms:.2f} ms a run"
        yield Finding("no-family-dominates", "note", text)


def _overhead(profile: Profile, steady_ms: float) -> Iterator[Finding]:
    # The profiler's own work lies between nodes too, so a run without it counts.
    between = 1 - profile.nodes_ms / steady_ms if steady_ms else 0.0
    if between >= _OVERHEAD and sum(profile.ran.values()) >= _MANY_NODES:
        text = f"at least {between:.0%} of a run ({steady_ms:.2f} ms) lies between its nodes: they are small"
        hint = "send larger batches; --shape 'INPUT=8,…' measures what that gains"
        yield Finding("time-between-nodes", "advice", text, hint)


def _placement(profile: Profile) -> Iterator[Finding]:
    text = (
        "times of nodes are those of launching their kernels, not of running them, since ONNX Runtime does "
        "not record kernels (microsoft/onnxruntime #20398)"
    )
    yield Finding("times-are-of-launches", "note", text, "nsys profile --trace=cuda,nvtx python your_job.py")
    total, fallen, copies = sum(profile.ran.values()), profile.ran.get(CPU, 0), profile.copies()
    if fallen:
        on_cpu = [row for row in profile.operators if row.provider == CPU]
        kinds = tuple(dict.fromkeys(row.operator for row in on_cpu))
        ms = sum(row.ms for row in on_cpu)
        text = f"{fallen} of {total} nodes run on the CPU, {ms:.2f} ms a run: {', '.join(kinds)[:300]}"
        if _SHAPES.issuperset(kinds) and not copies:
            # ONNX Runtime moves arithmetic on shapes there itself, since copying them would take longer.
            text = f"{text}; arithmetic on shapes, which belongs on the CPU"
            yield Finding("shapes-on-the-cpu", "note", text)
        else:
            hint = "export with another opset or element type, if the provider has no kernel for these"
            yield Finding("nodes-on-the-cpu", "advice", text, hint)
    if copies:
        text = f"{copies} copies between devices in every run"
        hint = "keep neighbouring nodes on one device; tune: {allow: [io_binding]} spares copies of inputs"
        yield Finding("copies-between-devices", "advice", text, hint)
    if not fallen and not copies:
        text = f"all {total} nodes run on the device, without copies between"
        yield Finding("all-on-the-device", "ok", text)
