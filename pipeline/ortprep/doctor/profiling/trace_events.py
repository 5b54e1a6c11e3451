"""The events of ONNX Runtime's profile, a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
        kernels=tuple(event for category, event in events if category == "Kernel"),
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
    arguments = row.get("args", {})
    name = str(row["name"])
    is_kernel_time = name.endswith(_KERNEL)
    return TraceEvent(
        name=name.removesuffix(_KERNEL),
        start_us=float(row["ts"]),
        us=float(row["dur"]),
        # ONNX Runtime also notes fences and the like of a node; its run is what counts.
        operator=str(arguments.get("op_name", "")) if is_kernel_time or row["cat"] == "Kernel" else "",
        provider=str(arguments.get("provider", "")),
        thread=int(row.get("tid", 0)),
    )
