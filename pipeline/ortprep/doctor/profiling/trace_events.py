"""The events of ONNX Runtime's profile, a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortprep.bundle.session_record import SessionPlan
from ortprep.errors import LoadError

_KERNEL = "_kernel_time"
_RUN = "model_run"


def profiled(plan: SessionPlan, prefix: Path, **attributes: int) -> SessionPlan:
    """Returns a plan whose session writes a profile to a file with that prefix.

    Args:
        plan: How the session is made.
        prefix: First part of the file's path.
        attributes: Further attributes of the session options.
    """
    options = plan.session_options
    added: dict[str, int | bool | str] = {
        "enable_profiling": True,
        "profile_file_prefix": str(prefix),
        **attributes,
    }
    return plan._replace(
        session_options=options._replace(attributes={**options.attributes, **added, **attributes})
    )


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
        operator=str(arguments.get("op_name", "")) if is_kernel_time else "",
        provider=str(arguments.get("provider", "")),
        thread=int(row.get("tid", 0)),
    )
