"""The events of ONNX Runtime's profile, a Chrome trace. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pipeline.errors import LoadError

_KERNEL = "_kernel_time"
_RUN = "model_run"


@dataclass(frozen=True)
class Event:
    """Something that took time.

    Attributes:
        name: Of the event; of a node, the node's.
        start_us: Since the profile began, µs.
        us: How long it took.
        operator: Operator type of a node, "" for none.
        provider: Execution provider of a node, "" for none.
    """

    name: str
    start_us: float
    us: float
    operator: str = ""
    provider: str = ""


@dataclass(frozen=True)
class ProfileEvents:
    """What a profile has.

    Attributes:
        session: Loading, initialising, runs.
        nodes: Runs of nodes.
        kernels: Runs of GPU kernels, where the build of ONNX Runtime records them.
    """

    session: tuple[Event, ...]
    nodes: tuple[Event, ...]
    kernels: tuple[Event, ...]

    def runs(self) -> tuple[tuple[Event, ...], ...]:
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


def total_us(events: Sequence[Event]) -> dict[str, float]:
    """Returns the time of events by operator, µs."""
    totals: dict[str, float] = {}
    for event in events:
        totals[event.operator] = totals.get(event.operator, 0.0) + event.us
    return totals


def parse_events(document: object) -> ProfileEvents:
    """Returns the events of a profile.

    Args:
        document: What ONNX Runtime's profile is as JSON: an array of trace events, or an object that has one.

    Raises:
        LoadError: It is neither.
    """
    rows = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise LoadError("not a profile of ONNX Runtime\n  expected an array of trace events, got none")
    found = [(str(row.get("cat")), _event(row)) for row in _complete(rows)]
    return ProfileEvents(
        session=tuple(event for category, event in found if category == "Session"),
        nodes=tuple(event for category, event in found if category == "Node" and event.operator),
        kernels=tuple(event for category, event in found if category == "Kernel"),
    )


def _complete(rows: Sequence[object]) -> Iterator[Mapping[str, Any]]:
    for row in rows:
        if isinstance(row, dict) and row.get("ph") == "X" and _is_number(row.get("ts"), row.get("dur")):
            yield row


def _is_number(*values: object) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _event(row: Mapping[str, Any]) -> Event:
    own = row.get("args")
    arguments: Mapping[str, Any] = own if isinstance(own, dict) else {}
    name = str(row.get("name"))
    is_kernel_time = name.endswith(_KERNEL)
    return Event(
        name=name.removesuffix(_KERNEL),
        start_us=float(row["ts"]),
        us=float(row["dur"]),
        # ONNX Runtime also notes fences and the like of a node; its run is what counts.
        operator=str(arguments.get("op_name", "")) if is_kernel_time or row.get("cat") == "Kernel" else "",
        provider=str(arguments.get("provider", "")),
    )
