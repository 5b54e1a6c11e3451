"""The events of ONNX Runtime's profile, a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ortprep.errors import LoadError

_KERNEL = "_kernel_time"
_RUN = "model_run"


@dataclass(frozen=True)
class TraceEvent:
    """Something that took time.

    Attributes:
        name: Of the event; of a node, the node's.
        start_us: Since the profile began, µs.
        us: How long it took.
        operator: Operator type of a node, "" for none.
        provider: Execution provider of a node, "" for none.
        thread: What it ran on.
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
        kernels: Runs of GPU kernels, where the build of ONNX Runtime records them.
    """

    session: tuple[TraceEvent, ...]
    nodes: tuple[TraceEvent, ...]
    kernels: tuple[TraceEvent, ...]

    def runs(self) -> tuple[tuple[TraceEvent, ...], ...]:
        """Returns the events of nodes, run by run."""
        spans = sorted((e.start_us, e.start_us + e.us) for e in self.session if e.name == _RUN)
        return tuple(
            tuple(node for node in self.nodes if begin <= node.start_us <= end) for begin, end in spans
        )

    def first_run_excess(self) -> dict[str, float]:
        """Returns by operator how much longer, in ms, it took in the first run than in the median later one.

        That is what kernels loaded when first used, convolution plans and memory touched for the first time
        cost. Nothing where there were fewer than two runs.
        """
        totals = [total_us(run) for run in self.runs()]
        if len(totals) < 2:
            return {}
        usual = {name: median([one.get(name, 0.0) for one in totals[1:]]) for name in totals[0]}
        return {name: (us - usual[name]) / 1e3 for name, us in totals[0].items() if us > usual[name]}


def total_us(events: Sequence[TraceEvent]) -> dict[str, float]:
    """Returns the time of events by operator, µs."""
    totals: dict[str, float] = {}
    for event in events:
        totals[event.operator] = totals.get(event.operator, 0.0) + event.us
    return totals


def parse_events(document: object) -> ProfileEvents:
    """Returns the events of a profile.

    Raises:
        LoadError: It is neither.
    """
    rows = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise LoadError("not a profile of ONNX Runtime\n  expected an array of trace events, got none")
    found = [(str(row.get("cat")), _event(row)) for row in _complete(rows)]
    return ProfileEvents(
        session=tuple(event for category, event in found if category == "Session"),
        nodes=own_times([event for category, event in found if category == "Node" and event.operator]),
        kernels=tuple(event for category, event in found if category == "Kernel"),
    )


def read_events(path: Path) -> ProfileEvents:
    """Reads a profile that ONNX Runtime wrote; names in it may be no UTF-8.

    Raises:
        LoadError: It is no profile.
        OSError: It cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise LoadError(f"not a profile of ONNX Runtime: {path.name}\n  {error}") from error
    return parse_events(document)


def _complete(rows: Sequence[object]) -> Iterator[Mapping[str, Any]]:
    for row in rows:
        if isinstance(row, dict) and row.get("ph") == "X" and _is_number(row.get("ts"), row.get("dur")):
            yield row


def _is_number(*values: object) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def own_times(events: Sequence[TraceEvent]) -> tuple[TraceEvent, ...]:
    """Returns events in order of their start, each with its time less that of the events within it.

    A `Loop` or `If` lasts as long as the nodes of its subgraph, which are told beside it.
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
    own = row.get("args")
    arguments: Mapping[str, Any] = own if isinstance(own, dict) else {}
    name = str(row.get("name"))
    is_kernel_time = name.endswith(_KERNEL)
    return TraceEvent(
        name=name.removesuffix(_KERNEL),
        start_us=float(row["ts"]),
        us=float(row["dur"]),
        # ONNX Runtime also notes fences and the like of a node; its run is what counts.
        operator=str(arguments.get("op_name", "")) if is_kernel_time or row.get("cat") == "Kernel" else "",
        provider=str(arguments.get("provider", "")),
        thread=row["tid"] if isinstance(row.get("tid"), int) else 0,
    )
